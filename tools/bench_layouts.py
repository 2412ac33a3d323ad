"""Layouts as `tools.bench step` names them (`solo`, `ep=2,zero=1`): whether they can run, what travels in them, even routing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from model import router
from model.config import ModelConfig
from parallel.collectives import all_reduce
from parallel.mesh import WIRES, Mesh, build_mesh, check_layout
from tools.bench_mirror import mirror_mesh
from training.config import ParallelConfig
from training.config_loading import Source, build, read_overrides
from training.errors import UserError

if TYPE_CHECKING:
    from tools.bench_step import Stepper


def parallel_of(text: str) -> ParallelConfig:
    """The `parallel` section that the keys of a layout make; `solo`: the defaults. Raises UserError for what are none."""
    source = Source()
    read_overrides([] if text == "solo" else text.split(","), source, set())
    parallel = build(ParallelConfig, source)
    if source.problems or parallel is None:
        raise UserError(f"--layouts {text} is neither solo nor keys of the parallel section: {'; '.join(source.problems)}")
    return parallel


def gathers(parallel: ParallelConfig) -> bool:
    """Whether every ep rank gets all tokens."""
    return parallel.dispatch == "gathered" or (parallel.dispatch == "auto" and parallel.ep == 2)


def refuse_impossible(text: str, ranks: int, config: ModelConfig, *, tokens: int, fp8: bool, mirror: bool, graph: bool) -> None:
    """Raises UserError, with all reasons, for a layout that cannot run on `ranks`. `tokens`: of a micro-batch."""
    p = parallel_of(text)
    if text == "solo":
        return
    heads = dict(num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads)
    problems = check_layout(ranks, p.tp, p.ep, num_experts=config.num_experts, tokens=tokens, **heads)
    if not problems and fp8:
        problems += config.fp8_problems(p.tp)
    if not 0 <= p.zero <= 2:
        problems.append(f"zero={p.zero} must be from 0 to 2")
    if mirror and p.tp != 1:
        problems.append(f"--mirror plays a rank with tp=1, not tp={p.tp}")
    if graph and (p.tp != 1 or (p.ep != 1 and not gathers(p)) or p.zero == 2):
        problems.append("--graph is for tp=1, ep=1 or gathered tokens, and zero below 2")
    if ranks == 1 and problems:
        problems.append("start it with torchrun --nproc-per-node N, or give --mirror N")
    if problems:
        raise UserError(f"--layouts {text}: {'; '.join(problems)}")


def layout_named(text: str, device: torch.device, mirror: int = 0) -> tuple[Mesh, ParallelConfig]:
    """`solo`, or keys of the `parallel` section: `ep=2,zero=1`; of `mirror` ranks that are not there."""
    p = parallel_of(text)
    if text == "solo":
        return Mesh.solo(), p
    if mirror:
        return mirror_mesh(mirror, p.ep, gathers(p)), p
    wires = dict(tp_wire=WIRES[p.tp_wire], combine_wire=WIRES[p.combine_wire], dispatch=p.dispatch, peer_copies=p.peer_copies)
    try:
        return build_mesh(p.tp, p.ep, device, p.sequence_parallel, **wires), p
    except ValueError as error:
        raise UserError(f"--layouts {text}: {error}") from error


def route_evenly(num_experts: int) -> None:
    """From now on tokens go to random experts, as evenly as from a balanced router: new ones send all tokens to a few experts."""
    own = router.route

    def even(logits_TE: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, None]:
        ids_Tk, weights_Tk, lse_T, _ = own(logits_TE, *rest[:-1], None)
        if rest[-1] is not None:
            rest[-1].add_(ids_Tk.numel() // num_experts)  # what is expected of each; counting them would take its time
        first_T1 = torch.randint(num_experts, ids_Tk[:, :1].shape, device=ids_Tk.device)
        k = ids_Tk.shape[1]
        return (first_T1 + num_experts // k * torch.arange(k, device=ids_Tk.device)) % num_experts, weights_Tk, lse_T, None

    router.route = even


def traffic_of(stepper: Stepper) -> dict[str, object]:
    """What this rank sends in a step, which of its waits are exposed, and how uneven the ranks' experts are: two more steps."""
    traffic = stepper.mesh.traffic
    if stepper.graphed is not None:
        stepper.capture_again()
    traffic.reset()
    traffic.timed = True
    for _ in range(2):
        stepper()
    if stepper.device.type == "cuda":
        torch.cuda.synchronize()
    sent = {kind: n / 2e6 for kind, n in sorted(traffic.by_kind().items())}
    exposed = {kind: s * 500 for kind, s in sorted(traffic.seconds().items())}
    traffic.timed = False
    return {"sent_mb": sent, "exposed_ms": exposed, "busiest": busiest_rank(stepper)}


def busiest_rank(stepper: Stepper) -> float:
    """Rows of the ep rank whose experts got most, over the mean rank's, layers averaged: the others wait for it in each layer."""
    mesh = stepper.mesh
    counts_LE = torch.stack([r.counts for _, r in router.routers(stepper.model)])
    rows_Ln = all_reduce(counts_LE, mesh.world, "bench").unflatten(1, (mesh.ep.size, -1)).sum(-1).float()
    return (rows_Ln.amax(1) / rows_Ln.mean(1)).mean().item()
