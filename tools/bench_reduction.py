"""What a gradient wire loses on the gradients of a run: `python -m tools.bench reduction --config configs/evidence.yaml --ranks 4`.

The run is trained with FP32 sums, each micro-batch standing for a rank (parallel/grad_simulated.py). At chosen steps the same
gradients are also rounded and added as every other wire would, and the sums are compared: so no trajectory differs, and a
difference is the wire's own.

    error      |sum - FP32 sum| / |FP32 sum| over all weights; and of the worst weight
    underflow  elements that are zero where the FP32 sum is not
    noise      |twice the sum of half of the ranks - the sum of all| / |the sum of all|: how well the gradient is known at all
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8.optimizer import AdamW
from fp8.weight import Weight, weights
from model.transformer import Transformer, initial_values
from parallel.grad_auto_scale import AutoScale
from parallel.grad_simulated import SimulatedReducer, SimulatedSums
from parallel.mesh import Mesh
from tools.arguments import at_least, make_parser, whole_numbers
from training.config import Config, load_config
from training.data import Loader, PackedDataset
from training.metrics import Phases
from training.packing import packed_path
from training.process import choose_device
from training.schedule import learning_rate
from training.step import TrainStep
from training.tokenizer import load_tokenizer

WIRES = ("bf16", "fp8", "fp8 stochastic", "fp8 zero=0", "fp8_lm")


class Probe(SimulatedSums):
    """FP32 sums that also look at what the other wires would have made; `errors` has a row for each wire while `looking`."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        super().__init__("fp32")
        self.ranks, self.looking, self.half, self.errors = ranks, False, {}, {}
        lm = AutoScale(ranks, device)
        options = {"bf16": {}, "fp8": {}, "fp8 stochastic": dict(stochastic=True), "fp8 zero=0": dict(sharded=False)}
        self.others = {name: SimulatedSums(name.split()[0], **given) for name, given in options.items()}
        self.others["fp8_lm"] = SimulatedSums("fp8_lm", auto=lm)

    def add(self, weight: Weight, rank: int) -> None:
        super().add(weight, rank)
        for sums in self.others.values() if self.looking else ():
            sums.add(weight, rank)
        if self.looking and rank == self.ranks // 2 - 1:
            self.half[weight] = self._totals[weight].clone()

    def total(self, weight: Weight) -> Tensor:
        total = super().total(weight)
        if self.looking:
            found = {name: sums.total(weight) for name, sums in self.others.items()} | {"noise": 2 * self.half.pop(weight)}
            for name, value in found.items():
                lost = ((value == 0) & (total != 0)).sum()
                row = torch.stack([(value - total).square().sum(), total.square().sum(), lost, (total != 0).sum()]).double()
                self.errors.setdefault(name, []).append(row)
        return total

    def rows(self) -> dict[str, tuple[float, float, float]]:
        """Name -> (error, that of the worst weight, underflow) of the step; forgets it."""
        found = {}
        for name, parts in self.errors.items():
            table = torch.stack(parts)
            error, size, lost, all_ = table.sum(0).tolist()
            each = (table[:, 0] / table[:, 1].clamp(min=1e-300)).sqrt()
            found[name] = (error / size) ** 0.5, each.max().item(), lost / all_
        self.errors = {}
        return found


def run(config: Config, ranks: int, at: Sequence[int]) -> None:
    """Trains and prints a table at the steps `at`."""
    train, optim = config.train, config.optim
    device, dtype = choose_device(train, config.fp8.recipe)
    tokenizer = load_tokenizer(config.data.tokenizer)
    data = PackedDataset(packed_path(config.data.dir, "train"), config.data.seq_len, tokenizer.fingerprint)
    sizes = dict(global_batch=train.global_batch, micro_batch=train.micro_batch, seed=train.seed)
    loader = Loader(data, **sizes, isolate_documents=config.data.isolate_documents)
    with torch.device(device):
        model = Transformer(config.model, config.fp8.build(), Mesh.solo(), dtype, config.fp8.activations)
    optimizer = AdamW(weights(model), optim.beta1, optim.beta2, optim.eps, optim.weight_decay, seed=train.seed)
    for name, _, value in initial_values(model, train.seed):
        optimizer.set_master(name, value)
    options = dict(bias_rate=config.model.bias_update_rate, auto=config.fp8.auto, cuda_graphs=train.cuda_graphs)
    take_step, probe = TrainStep(model, optimizer, Mesh.solo(), optim, phases=Phases(device), **options), Probe(ranks, device)
    take_step.reducer = SimulatedReducer(weights(model), ranks, probe)
    print(f"{'step':>6} {'loss':>8} {'wire':16} {'error':>9} {'worst weight':>13} {'underflow':>10}   ({ranks} ranks)")
    for step in range(1, max(at) + 1):
        probe.looking = step in at
        result = take_step(step, [b.to(device) for b in next(loader)], learning_rate(step - 1, optim, train.steps))
        for name, (error, worst, underflow) in probe.rows().items():
            print(f"{step:6} {result.loss:8.4f} {name:16} {error:9.5f} {worst:13.5f} {underflow:10.4%}", flush=True)


def main(argv: Sequence[str]) -> None:
    parser = make_parser("bench reduction", __doc__)
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--ranks", type=at_least(2), default=4, help="as many micro-batches of a step stand for them")
    parser.add_argument("--at", type=whole_numbers(1), default="1,20,100", help="steps at which wires are compared")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    config = load_config(args.config, [f"parallel.simulated_ranks={args.ranks}", *args.overrides], 1)
    run(config, args.ranks, args.at)
