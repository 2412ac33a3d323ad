"""The same layouts on GPUs over NCCL: `pytest -m multi_gpu tests/parallel/test_nccl.py` on a machine with two or more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8.optimizer import AdamW
from fp8.recipe import recipe_named
from fp8.weight import weights
from model.router import routers, update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.grad_reduce import GradReducer, global_grad_norm
from parallel.mesh import WIRES, Mesh, build_mesh
from tests.helpers import largest, run_ranks
from tests.parallel.layouts import CONFIG, backward, bits, errors, own_part

LAYOUTS = [(1, 1, True), (2, 1, True), (2, 1, False), (1, 2, True), (2, 2, True)]
STEPS = 3


def take_steps(mesh: Mesh, device: torch.device, recipe: str) -> tuple[Transformer, dict[str, Any]]:
    """Three AdamW steps in BF16 with `recipe`."""
    with torch.device(device):
        model = Transformer(CONFIG, recipe_named(recipe), mesh).train()
    named = list(weights(model))
    optimizer, reducer, got = AdamW(named), GradReducer(named, mesh), {"losses": [], "norms": []}
    for name, _, value in initial_values(model, seed=5):
        optimizer.set_master(name, value)
    for step in range(STEPS):
        got["losses"].append(backward(model, mesh, parts=1)[0])
        reducer.finish()
        norm = global_grad_norm(named, mesh)
        got["norms"].append(norm.item())
        if step == 0:
            got["grads"] = {n: w.main_grad.float().clone() for n, w in named}
        optimizer.step(1e-3, 1.0 / norm.clamp(min=1.0))
        update_expert_bias(model, mesh.world, 1e-3)
    got["bits"] = {(n, p.offset): bits(w.data[p.local]) for n, w in named for p in w.pieces}
    got["bits"] |= {(n, "bias"): bits(r.expert_bias) for n, r in routers(model)}
    return model, got


def compare(rank: int, size: int, store: str, recipe: str) -> dict[Any, Any]:
    """Each layout against one GPU, which every rank computes for itself."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.destroy_process_group()  # the helper's gloo
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=size, device_id=device)
    solo, want = take_steps(Mesh.solo(), device, recipe)
    whole, found = want["grads"], {}
    for tp, ep, sequence in LAYOUTS:
        for wires in ("bf16", "fp8"):
            mesh = build_mesh(tp, ep, device, sequence, tp_wire=WIRES[wires], combine_wire=WIRES[wires])
            model, got = take_steps(mesh, device, recipe)
            off = errors(model, got["grads"], whole)
            found[tp, ep, sequence, wires] = {
                "loss": largest(abs(a / b - 1) for a, b in zip(got["losses"], want["losses"], strict=True)),
                "norms": got["norms"],
                "norm": abs(got["norms"][0] / want["norms"][0] - 1),
                "grads": largest(off.values()),
                "cosine": 1
                - largest(
                    1 - torch.nn.functional.cosine_similarity(g.flatten(), own_part(w, whole[n]).flatten(), dim=0).item()
                    for (n, w), g in zip(weights(model), got["grads"].values(), strict=True)
                ),
                "bits": got["bits"],
            }
    return found


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("recipe", ["bf16", "block"])
def test_layouts_on_two_gpus(tmp_path: Path, recipe: str) -> None:
    by_rank = run_ranks(2, compare, str(tmp_path / "nccl"), recipe, timeout=280.0)
    for layout in by_rank[0]:
        one, two = (found[layout] for found in by_rank)
        wired = layout[-1] == "fp8" or recipe == "block"
        print(recipe, layout, {k: one[k] for k in ("loss", "norm", "grads", "cosine")})
        assert one["loss"] < (2e-2 if wired else 5e-3), layout
        assert one["norm"] < (5e-2 if wired else 1e-2), layout
        assert min(one["cosine"], two["cosine"]) > (0.9 if wired else 0.99), layout
        assert one["norms"] == two["norms"], f"ranks disagree on the norm: {layout}"
        for key in one["bits"].keys() & two["bits"].keys():
            assert one["bits"][key] == two["bits"][key], f"{key} differs between ranks, {layout}"
