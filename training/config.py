"""Every key of a run: the sections, and the checks that need more than one of them.

A run is a YAML file plus overrides: `train.py --config configs/tiny.yaml optim.lr=3e-4`. `training/config_loading.py`
reads and types the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fp8.config import Fp8Config
from fp8.optimizer import States
from model.config import ModelConfig
from model.policy import override_problems, stage_problems
from parallel.mesh import check_layout
from training.config_loading import Source, build, dump_yaml, read_overrides, read_yaml, section_keys
from training.corpus import DataConfig
from training.errors import UserError, counted
from training.faults import FaultConfig
from training.profile import ProfileConfig
from training.schedule import OptimConfig
from training.states import gradient_format, optimizer_states


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where a run writes. The folder holds config.yaml, metrics.jsonl, checkpoints/ and wandb/."""

    dir: str = "runs/default"
    name: str | None = None  # shown in wandb; the folder's name by default


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop. Each data-parallel rank takes its share of the global batch in micro-batches."""

    steps: int = 100
    seed: int = 1234  # initial weights and data order
    global_batch: int = 8  # sequences of data.seq_len tokens in one optimizer step, over all ranks
    micro_batch: int = 8  # sequences that one rank takes through the model at once
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bf16", "fp32"] = "auto"  # of what is not FP8: bf16 on a GPU, fp32 on a CPU
    # Forward and backward of a micro-batch in one launch (docs/performance.md), on one rank or with replicas; "collectives": with
    # gathered experts too, whose collectives are captured
    cuda_graphs: bool | Literal["collectives"] = False
    log_every: int = 10
    deterministic: bool = False  # equal runs are bitwise equal (docs/reliability.md: what it costs)
    timeout_s: float = 600.0  # a collective that takes longer stops the run


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """world = dp x tp; ep spans consecutive ranks (parallel/mesh.py)."""

    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = True
    # How sums travel (docs/parallelism.md). "bf16" is the residual stream's own dtype; "fp8" adds one rounding, sums in FP32
    tp_wire: Literal["bf16", "fp8"] = "bf16"  # after row-parallel layers
    combine_wire: Literal["bf16", "fp8"] = "bf16"  # expert outputs on their way back
    # Gradients over data-parallel ranks. fp8: tiles, summed in FP32; fp8_lm: summed in FP8 under a shared scale (FP8-LM); auto: fp8
    # in FP8 recipes, fp32 in fp8.recipe=bf16 and fp32
    grad_wire: Literal["auto", "fp32", "bf16", "fp8", "fp8_lm"] = "auto"
    grad_rounding: Literal["nearest", "stochastic"] = "nearest"  # of grad_wire=fp8
    # Which tokens an ep rank gets: those of its experts, counted first, or all of them, without counts and without the host; auto:
    # gathered at ep = 2
    dispatch: Literal["auto", "counted", "gathered"] = "auto"
    peer_copies: bool = False  # gathered at ep = 2 on one host: by the GPUs' copy engines instead of NCCL's kernels
    # Optimizer states split over the replicas of a weight (1), gradients too (2); 0: every replica has all of them
    zero: int = 1
    overlap_gather: bool = True  # sharded: new weights arrive under the next forward
    zero_partition: Literal["rows", "tensors"] = "rows"  # cut between 128-row blocks, or whole tensors by size
    # One process: gradients are rounded and added as by so many ranks, each micro-batch of a step being one; 0: not at all
    simulated_ranks: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and resuming. The last step is always saved unless `every` is 0."""

    every: int = 1000  # steps; 0 saves nothing at all, when stopped by a signal neither
    keep: int = 2  # newest whole checkpoints that stay
    keep_for_merge: int = 0  # stay too, when this is more: the inputs of tools.merge
    keep_every: int = 0  # the checkpoint of every so many steps stays for ever; 0: none does
    background: bool = True  # written from a copy in host memory while training goes on
    # "auto": the newest whole one of run.dir, if there is one; "none"; or the path of a run or of one checkpoint, for a
    # run.dir without checkpoints (the same command, started again, goes on from those it has written since)
    resume: str = "auto"
    # A run without checkpoints of its own starts from the weights of this one (an import, a merge, a run), moments at zero
    init_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation: loss over the same samples each time, and a sample of text."""

    every: int = 1000  # steps; 0: only after the last step
    samples: int = 256  # sequences of the validation set; 0: no evaluation at all, and no validation.bin is needed
    prompt: str = ""  # when given, what generation continues after each evaluation
    sample_tokens: int = 64


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Console, metrics.jsonl and wandb."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"  # auto: online with a key, else offline
    project: str = "octet"
    entity: str | None = None
    progress: bool = True  # a bar, on a terminal
    reference: str | None = None  # folder of a run; gap/loss and gap/val_loss are the differences to its losses, in percent


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    fp8: Fp8Config = field(default_factory=Fp8Config)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.data.seq_len

    @property
    def fewest_ranks(self) -> int:
        """The smallest world that the layout fits."""
        return math.lcm(max(self.parallel.tp, 1), max(self.parallel.ep, 1))

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, for JSON and wandb."""
        return asdict(self)

    def to_yaml(self) -> str:
        """A file that `load_config` reads back to an equal Config."""
        return dump_yaml(self.to_dict())

    def problems(self, world_size: int = 1) -> list[str]:
        """Everything inconsistent about running this on `world_size` ranks, each with its numbers."""
        return self._range_problems() + self.model.problems() + self._fit_problems(world_size)

    def _range_problems(self) -> list[str]:
        found = []
        for key, low, high in _RANGES:
            section, name = key.split(".")
            value = getattr(getattr(self, section), name)
            if not low <= value <= high:
                limits = f"at least {low}" if high == _ANY else f"from {low} to {high}"
                found.append(f"{key}={value} must be {limits}")
        return found

    def _fit_problems(self, world_size: int) -> list[str]:
        train, optim, parallel, model = self.train, self.optim, self.parallel, self.model
        found = []
        found += self.fp8.problems() + stage_problems(self.fp8.activations, model)
        is_fp8 = not found and self.fp8.build().is_fp8
        if is_fp8:
            found += model.fp8_problems(max(parallel.tp, 1))
        if self.fp8.overrides and not found and not model.problems():
            found += override_problems(self.fp8.build(), model)
        widths = {
            "model.intermediate_size": model.intermediate_size,
            "the shared expert's width": model.shared_intermediate_size,
            "model.vocab_size": model.vocab_size,
        }
        layout = check_layout(
            world_size,
            parallel.tp,
            parallel.ep,
            num_experts=model.num_experts,
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_key_value_heads,
            tokens=train.micro_batch * self.data.seq_len,
            widths={} if is_fp8 else widths,
        )
        start = f": start it with torchrun --nproc-per-node {self.fewest_ranks} train.py ..." if world_size == 1 else ""
        found += [problem + start if problem.startswith("world size") else problem for problem in layout]
        dp = max(world_size // max(parallel.tp, 1), 1)
        if train.micro_batch >= 1 and train.global_batch % (train.micro_batch * dp):
            found.append(
                f"train.global_batch={train.global_batch} is not a multiple of train.micro_batch={train.micro_batch} "
                f"x {counted(dp, 'data-parallel rank')} = {train.micro_batch * dp}"
            )
        simulated, parts = parallel.simulated_ranks, train.global_batch / max(train.micro_batch, 1)
        if simulated and (world_size > 1 or parts != simulated):
            found.append(
                f"parallel.simulated_ranks={simulated} needs one process and as many micro-batches a step; here are "
                f"{counted(world_size, 'process', 'processes')} and train.global_batch / train.micro_batch = {parts:g}"
            )
        level = self.fp8.level
        low = optimizer_states(optim, level) != States() or gradient_format(optim, level) != "fp32"
        if self.fp8.name == "fp32" and low:
            found.append("fp8.recipe=fp32 is the reference: optimizer states and gradients stay fp32 (optim.states, fp8.level)")
        if self.profile.start > train.steps:
            found.append(f"profile.start={self.profile.start} is after the last step, train.steps={train.steps}")
        if not self.run.dir.strip():
            found.append("run.dir is empty: name the folder that the run writes to")
        if optim.schedule == "wsd" and optim.decay_steps < 1:
            found.append(f"optim.decay_steps={optim.decay_steps} must be at least 1 with optim.schedule=wsd")
        if self.data.seq_len > model.max_position_embeddings:
            found.append(
                f"data.seq_len={self.data.seq_len} is more than model.max_position_embeddings={model.max_position_embeddings}"
            )
        if self.data.vocab_size > model.vocab_size:
            more = f"data.vocab_size={self.data.vocab_size} is more than model.vocab_size={model.vocab_size}"
            found.append(f"{more}: every token of the tokenizer needs a row in the model; lower the one or raise the other")
        return found


_ANY = float("inf")
_RANGES = (
    ("train.steps", 1, _ANY),
    ("train.seed", 0, 2**63 - 1),
    ("train.global_batch", 1, _ANY),
    ("train.micro_batch", 1, _ANY),
    ("train.log_every", 1, _ANY),
    ("train.timeout_s", 1, _ANY),
    ("parallel.zero", 0, 2),
    ("parallel.simulated_ranks", 0, _ANY),
    ("optim.lr", 0, _ANY),
    ("optim.warmup_steps", 0, _ANY),
    ("optim.decay_steps", 0, _ANY),
    ("optim.min_lr_ratio", 0, 1),
    ("optim.beta1", 0, 0.999999),
    ("optim.beta2", 0, 0.999999),
    ("optim.eps", 1e-30, 1),
    ("optim.weight_decay", 0, _ANY),
    ("optim.clip", 0, _ANY),
    ("checkpoint.every", 0, _ANY),
    ("checkpoint.keep", 1, _ANY),
    ("checkpoint.keep_for_merge", 0, _ANY),
    ("checkpoint.keep_every", 0, _ANY),
    ("eval.every", 0, _ANY),
    ("eval.samples", 0, _ANY),
    ("eval.sample_tokens", 1, _ANY),
    ("profile.start", 0, _ANY),
    ("profile.steps", 1, _ANY),
    ("profile.ranks", 1, _ANY),
    ("faults.max_streak", 1, _ANY),
    ("faults.spike_loss", 0, _ANY),
    ("faults.spike_norm", 0, _ANY),
    ("faults.compare_every", 0, _ANY),
    ("faults.underflow", 0, 1),
    ("faults.saturation", 0, 1),
    ("faults.slow_rank", 1, _ANY),
    ("faults.quiet_s", 1, _ANY),
    ("faults.stop_within_s", 1, _ANY),
)


def load_config(path: str, overrides: Iterable[str] = (), world_size: int | None = None) -> Config:
    """The run that a YAML file and `section.key=value` overrides describe.

    Args:
        world_size: ranks that it is checked for; None stands for the fewest that its layout can run on.

    Raises:
        UserError: the file cannot be read, or anything is wrong; all mistakes stand in the one message.
    """
    source, sections = Source(), section_keys(Config)
    read_yaml(path, source, sections)
    read_overrides(overrides, source, sections)
    config = build(Config, source)
    problems = list(source.problems)
    if config is not None:
        problems += config.problems(config.fewest_ranks if world_size is None else world_size)
    if config is None or problems:
        title = f"{path}: {len(problems)} problem{'s'[: len(problems) != 1]}"
        raise UserError("\n  - ".join([title, *problems]))
    return config
