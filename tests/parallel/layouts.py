"""What each rank runs for test_layouts.py: some steps under a layout, compared with the reference's tensors on the spot."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8.optimizer import AdamW
from fp8.recipe import recipe_named
from fp8.scaling import role_scales, update_scales
from fp8.weight import Weight, weights
from model.config import ModelConfig
from model.loss import NumValid, count_valid
from model.router import bias_update, routers, update_expert_bias
from model.transformer import Transformer, initial_values
from parallel.collectives import all_reduce
from parallel.grad_reduce import GradReducer, global_grad_norm
from parallel.mesh import WIRES, Mesh, build_mesh
from tests.helpers import largest
from tests.parallel.reference import Reference

# Widths are multiples of 128 x 4, so that the block recipe runs at tp = 4; two KV heads, so that tp = 4 replicates them.
CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=512,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=512,
    n_group=4,
    topk_group=2,
    num_nextn_predict_layers=1,
    initializer_range=0.05,
    aux_loss_weight=0.05,
    router_z_loss_weight=1e-3,
    loss_chunk=128,
)
BATCH, SEQ, LR, CLIP, STEPS = 4, 32, 0.5, 1.0, 3
ADAM = dict(lr=1e-2, eps=1e-3)  # a large eps: Adam's first step is otherwise the sign of rounding noise where a gradient is 0


@dataclass(frozen=True)
class Case:
    """One run of a few steps.

    Attributes:
        wires: "fp8" sends the sums over tp and ep as FP8.
        idle: biases that send every token to experts 0-3, so that whole ranks are idle.
        parts: micro-batches.
    """

    tp: int = 1
    ep: int = 1
    sequence: bool = True
    recipe: str = "fp32"
    parts: int = 1
    stage: int = 0
    idle: bool = False
    wires: str = "bf16"

    @property
    def oracle(self) -> str:
        """Which expectation it is held to: the plain model in fp32, one process of our own in FP8."""
        return f"{self.recipe}{' idle' * self.idle}"


def global_batch() -> tuple[Tensor, Tensor]:
    """(tokens, labels) [4, 32]: rows with unequal numbers of valid labels, the last one with none."""
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[0, 7:], labels[2, ::3], labels[3] = -100, -100, -100
    return tokens[:, :-1].contiguous(), labels


def build(case: Case, mesh: Mesh, config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config, recipe_named(case.recipe), mesh, dtype=torch.float32, stage=case.stage)
    for _, weight, value in initial_values(model, seed=5):
        weight.set_(value)
    for _, router in routers(model):
        router.expert_bias += idle_bias(case.idle)
    return model.train()


def idle_bias(idle: bool) -> Tensor:
    return torch.where(torch.arange(CONFIG.num_experts) < 4, 10.0 * idle, 0.0)


def backward(model: Transformer, mesh: Mesh, parts: int, num_valid: NumValid | None = None) -> tuple[float, float]:
    """Gradients of this rank's rows of the global batch, in `parts` micro-batches; returns global loss and auxiliary losses."""
    device = model.norm.data.device
    batch = [x.to(device) for x in global_batch()]
    tokens, labels = (x.chunk(mesh.dp.size)[mesh.dp.rank] for x in batch)
    total = num_valid or count_valid(*batch)
    found, parts = torch.zeros(2, device=device), min(parts, len(tokens))
    for i, (t, y) in enumerate(zip(tokens.chunk(parts), labels.chunk(parts), strict=True)):
        for _, weight in weights(model):
            weight.last_microbatch = i == parts - 1
        losses = model(t, y, total)
        losses.total.backward()
        found += torch.stack([losses.total.detach(), losses.aux_loss])
    loss, aux = all_reduce(found, mesh.dp, "test").tolist()
    return loss, aux


def own_part(weight: Weight, whole: Tensor) -> Tensor:
    """This rank's part of a global tensor."""
    part = whole.new_empty(weight.data.shape)
    for piece in weight.pieces:
        sizes = [s.stop - s.start for s in piece.local]
        part[piece.local] = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, sizes, strict=True))]
    return part


def error(got: Tensor, want: Tensor, whole: Tensor) -> float:
    """Relative error of a part; a part without signal (an idle expert) is measured against its share of the whole."""
    floor = 1e-2 * whole.norm() * (want.numel() / whole.numel()) ** 0.5
    return ((got - want).norm() / torch.maximum(want.norm(), floor).clamp(min=1e-30)).item()


def errors(model: Transformer, got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    return {name: error(got[name], own_part(w, want[name]), want[name]) for name, w in weights(model)}


def bits(x: Tensor) -> int:
    """A digest of the exact bits of a tensor."""
    return zlib.crc32(x.contiguous().view(torch.uint8).cpu().numpy())


def take_steps(case: Case, mesh: Mesh) -> tuple[Transformer, dict[str, Any]]:
    """One AdamW step, and three SGD steps from the same start; tensors are this rank's parts."""
    model = build(case, mesh)
    named, got = list(weights(model)), {"init": {n: v for n, _, v in initial_values(model, seed=5)}}
    reducer = GradReducer(named, mesh, bucket_bytes=1 << 20)
    optimizer = AdamW(named, eps=ADAM["eps"])
    for name, value in got["init"].items():
        optimizer.set_master(name, value)

    def gradients() -> Tensor:
        got["loss"], got["aux"] = backward(model, mesh, case.parts)
        got["started"] = mesh.traffic.by_kind().get("gradients", 0)
        reducer.finish()
        got["reduced"] = mesh.traffic.by_kind().get("gradients", 0)
        update_scales(model, partial(all_reduce, axis=mesh.world, kind="test", op="max"))
        return global_grad_norm(named, mesh)

    norm = gradients()
    got["norm"] = norm.item()
    got["counts"] = {n: all_reduce(r.counts.clone(), mesh.world, "test").tolist() for n, r in routers(model)}
    got["grads"] = {n: w.main_grad.clone() for n, w in named}
    optimizer.step(ADAM["lr"], CLIP / norm.clamp(min=CLIP))
    got["adam"] = {n: s["master"].clone() for n, s in optimizer.state().items()}
    got["traffic"], first, got["first aux"] = dict(mesh.traffic.sent), got["loss"], got["aux"]

    masters, grads = got["init"], got["grads"]
    for step in range(STEPS):  # the first from the gradients that AdamW had
        scale = LR * CLIP / norm.clamp(min=CLIP)
        masters = {n: masters[n] - scale * grads[n] for n, _ in named}
        update_expert_bias(model, mesh.world, 1e-3)
        for name, weight in named:
            weight.set_(masters[name])
            weight.clear_grad()
        if step < STEPS - 1:
            norm, grads = gradients(), {n: w.main_grad for n, w in named}
    got["sgd"], got["loss"], got["last loss"] = masters, first, got["loss"]
    got["bias"] = {n: r.expert_bias.clone() for n, r in routers(model)}
    got["scales"] = torch.stack([s.scale_inv for s in role_scales(model)]) if role_scales(model) else torch.zeros(0)
    return model, got


def run_case(case: Case, want: dict[str, Any]) -> dict[str, Any]:
    """The steps under this process's layout, and how far they are from `want`; plain numbers only."""
    mesh = build_mesh(case.tp, case.ep, sequence_parallel=case.sequence, tp_wire=WIRES[case.wires], combine_wire=WIRES[case.wires])
    model, got = take_steps(case, mesh)
    named = list(weights(model))
    seen = {key: got[key] for key in ("loss", "norm", "counts", "traffic", "last loss", "first aux", "started", "reduced")}
    for key in ("init", "grads", "adam", "sgd"):
        seen[key] = errors(model, got[key], want[key])
    seen["bias"] = {n: (b - want["bias"][n]).abs().max().item() for n, b in got["bias"].items()}
    seen["counts reset"] = all(not r.counts.any() for _, r in routers(model))
    seen["finite"] = all(bool(g.isfinite().all()) for key in ("grads", "sgd") for g in got[key].values())
    idle = [got["grads"][n][own_part(w, _idle_experts(w)) > 0] for n, w in named if w.expert]
    seen["idle gradient"] = largest([0.0, *(g.abs().max().item() for g in idle if g.numel())])
    seen["bits"] = {(n, p.offset): (bits(w.data[p.local]), bits(got["sgd"][n][p.local])) for n, w in named for p in w.pieces}
    seen["bits"] |= {(n, "bias"): bits(b) for n, b in got["bias"].items()}
    seen["bits"] |= {("scales", "all"): bits(got["scales"])}
    seen["scales"] = torch.equal(got["scales"], want.get("scales", got["scales"]))
    return seen


def _idle_experts(weight: Weight) -> Tensor:
    """Ones for the experts that an idle case leaves without a token."""
    whole = torch.zeros(weight.global_shape)
    whole[4:] = 1
    return whole


def reference_run(idle: bool) -> dict[str, Any]:
    """What `take_steps` must find, from the plain single-process model."""
    start = Transformer(CONFIG, recipe_named("fp32"), Mesh.solo(), dtype=torch.float32)
    init = {name: value for name, _, value in initial_values(start, seed=5)}
    names = [name for name, _ in routers(start)]

    def fresh() -> Reference:
        return Reference(CONFIG, {n: v.clone().requires_grad_() for n, v in init.items()}, {n: idle_bias(idle) for n in names})

    ref, batch = fresh(), global_batch()
    loss = ref.loss(*batch)
    loss.backward()
    want = {
        "init": init,
        "loss": loss.item(),
        "first aux": ref.loss(*batch, with_ce=False).item(),
        "counts": {n: c.tolist() for n, c in ref.counts.items()},
    }
    want["grads"] = {n: w.grad for n, w in ref.weights.items()}
    norm = torch.stack([g.double().square().sum() for g in want["grads"].values()]).sum().sqrt().float()
    want["norm"] = norm.item()
    decay = {n: w.decay for n, w in weights(start)}
    for name, w in ref.weights.items():
        w.data.mul_(1 - ADAM["lr"] * 0.1 * decay[name])
        grad = w.grad * CLIP / norm.clamp(min=CLIP)
        w.data.sub_(ADAM["lr"] * grad / (grad.abs() + ADAM["eps"]))  # first step: m / (1 - b1) = g, v / (1 - b2) = g^2
    want["adam"] = {n: w.detach() for n, w in ref.weights.items()}

    ref = fresh()
    for _ in range(STEPS):
        for w in ref.weights.values():
            w.grad = None
        ref.loss(*batch).backward()
        norm = torch.stack([w.grad.double().square().sum() for w in ref.weights.values()]).sum().sqrt().float()
        for w in ref.weights.values():
            w.data.sub_(LR * w.grad * CLIP / norm.clamp(min=CLIP))
        for name in names:
            ref.biases[name] = bias_update(ref.biases[name], ref.counts[name], 1e-3)
    want["sgd"], want["bias"] = {n: w.detach() for n, w in ref.weights.items()}, ref.biases
    return want


def run_cases(rank: int, size: int, cases: list[Case], path: str) -> dict[Case, dict]:
    """Results by case. `path`: a file with what is expected by `Case.oracle` (as arguments, each tensor is a descriptor)."""
    wants = torch.load(path)
    return {case: run_case(case, wants[case.oracle]) for case in cases}


# ---------------------------------------------------------------- what trains the router


NO_AUX = replace(CONFIG, aux_loss_weight=0.0, router_z_loss_weight=0.0)
DOUBLE_AUX = replace(CONFIG, aux_loss_weight=2 * CONFIG.aux_loss_weight, router_z_loss_weight=2 * CONFIG.router_z_loss_weight)


def router_gradients_wanted() -> dict[str, dict[str, Tensor]]:
    """Router gradients of the plain model: main loss alone, auxiliary losses alone."""
    start = Transformer(CONFIG, recipe_named("fp32"), Mesh.solo(), dtype=torch.float32)
    want = {}
    for key, config, with_ce in (("main", NO_AUX, True), ("aux", CONFIG, False)):
        init = {name: value.requires_grad_() for name, _, value in initial_values(start, seed=5)}
        ref = Reference(config, init, {n: idle_bias(False) for n, _ in routers(start)})
        ref.loss(*global_batch(), with_ce=with_ce).backward()
        want[key] = {name: w.grad for name, w in init.items() if "router" in name}
    return want


def router_gradients(rank: int, size: int, case: Case) -> dict[str, dict[str, Tensor]]:
    """The same and the doubled auxiliary losses, under a layout."""
    mesh, found = build_mesh(case.tp, case.ep, sequence_parallel=case.sequence), {}
    whole = count_valid(*global_batch())
    never = NumValid(torch.tensor(float("inf")), torch.tensor(float("inf")), whole.tokens)  # cross-entropies over infinity
    for key, config, valid in (("main", NO_AUX, whole), ("aux", CONFIG, never), ("double", DOUBLE_AUX, never)):
        model = build(case, mesh, config)
        named = list(weights(model))
        reducer = GradReducer(named, mesh)
        backward(model, mesh, case.parts, valid)
        reducer.finish()
        found[key] = {name: w.main_grad.clone() for name, w in named if "router" in name}
    return found


def ties(rank: int, size: int, recipe: str) -> list[tuple[dict[str, int], dict[str, list[int]]]]:
    """Digests of all gradients, and routing counts, by activation stage, where every router logit ties."""
    mesh, found = build_mesh(1, size), []
    for stage in range(5):
        model = build(Case(ep=size, recipe=recipe, stage=stage), mesh)
        for _, router in routers(model):
            router.weight.set_(torch.zeros(router.weight.data.shape))
        reducer = GradReducer(weights(model), mesh)
        backward(model, mesh, parts=1)
        reducer.finish()
        counts = {name: r.counts.tolist() for name, r in routers(model)}
        found.append(({name: bits(w.main_grad) for name, w in weights(model)}, counts))
    return found
