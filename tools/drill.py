"""Kills ranks of a small training run at random, restarts it each time, and compares it with a run that nobody disturbed.

    python -m tools.drill                       50 kills, 2 to 4 CPU ranks: some minutes
    python -m tools.drill --kills 4 --ranks 2   the short form, as in the tests

Each kill is `kill -9`, of one rank or of all of them, at a random moment of a random step or while a checkpoint is being
written. A rank that loses its peers ends by itself. Then the ranks start again, as torchrun would start them. In the end every
loss, gradient norm and tensor must equal the undisturbed run's, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.arguments import at_least, make_parser
from training.errors import exit_status
from training.run_state import whole_checkpoints

EVERY = 3  # steps between checkpoints
CONFIG = """
model: {vocab_size: 384, hidden_size: 128, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 64,
  intermediate_size: 128, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 128, n_group: 2, topk_group: 2,
  num_nextn_predict_layers: 0, max_position_embeddings: 64, initializer_range: 0.05, loss_chunk: 128}
data: {source: text, paths: [TEXTS/*.txt], dir: FOLDER, tokenizer: FOLDER/t.model, vocab_size: 350, seq_len: 32,
  validation_fraction: 0.2}
train: {global_batch: 12, micro_batch: 1, log_every: 1, device: cpu, timeout_s: 60}
optim: {lr: 3.0e-3, schedule: cosine, warmup_steps: 2}
eval: {samples: 0}
log: {wandb: off, progress: false}
"""


@dataclass
class Report:
    """What happened; `failures` must be empty."""

    kills: int = 0
    one_rank: int = 0
    all_ranks: int = 0
    while_saving: int = 0
    half_saves: int = 0  # folders that a kill left half written
    from_scratch: int = 0  # restarts before the first checkpoint
    steps_lost: list[int] = field(default_factory=list)  # steps trained and not on disk, per kill
    survivors: dict[str, int] = field(default_factory=dict)  # exit codes of ranks that lost their peers
    runs: int = 0
    failures: list[str] = field(default_factory=list)

    def text(self) -> str:
        lost = self.steps_lost or [0]
        return (
            f"{self.kills} kills ({self.one_rank} of one rank, {self.all_ranks} of all; {self.while_saving} while saving, "
            f"{self.half_saves} half-written checkpoints left behind) over {self.runs} runs; steps lost: at most {max(lost)}, "
            f"{sum(lost) / len(lost):.1f} in the mean; {self.from_scratch} kills came before the first checkpoint; "
            f"{len(self.failures)} failures"
        )


@dataclass(frozen=True)
class Kill:
    """Which ranks die, and when: so many seconds after step `step` begins, or after the first save from there on does."""

    ranks: tuple[int, ...]
    step: int
    saving: bool
    delays: tuple[float, ...]  # by rank

    def arm(self, rank: int) -> None:
        """In the process that is to die."""
        import training.checkpoint as checkpoint
        from training.step import TrainStep

        take_step, write, reached = TrainStep.__call__, checkpoint.write_shards, threading.Event()

        def die() -> None:
            threading.Timer(self.delays[rank], os.kill, (os.getpid(), signal.SIGKILL)).start()

        def step(own: TrainStep, number: int, *args: Any, **options: Any) -> Any:
            if number == self.step:
                reached.set() if self.saving else die()
            return take_step(own, number, *args, **options)

        def save(*args: Any) -> dict[str, list[int]]:
            if self.saving and reached.is_set():
                die()
            return write(*args)

        TrainStep.__call__, checkpoint.write_shards = step, save


class Job:
    """One start of all ranks of a run."""

    def __init__(
        self, context: multiprocessing.context.BaseContext, arguments: list[str], ranks: int, log: Path, kill: Kill | None
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            context.Process(target=_rank, args=(rank, ranks, port, arguments, str(log), kill)) for rank in range(ranks)
        ]
        for process in self.processes:
            process.start()

    def end(self, timeout_s: float = 300.0) -> list[int | None]:
        """Waits for every rank; the exit codes, None for one that had to be killed after `timeout_s`."""
        deadline, codes = time.monotonic() + timeout_s, []
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
            if process.is_alive():
                process.kill()
                process.join()
        return codes


def _rank(rank: int, ranks: int, port: int, arguments: list[str], log: str, kill: Kill | None) -> None:
    """A rank as torchrun starts it; says what it says into `log`."""
    with open(log, "a", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(address, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch

    import train

    torch.set_num_threads(1)
    if kill is not None and rank in kill.ranks:
        kill.arm(rank)
    sys.exit(train.main(arguments))


def make_base(folder: Path) -> Path:
    """A configuration, a tokenizer and packed data in `folder`; the configuration's path."""
    from training.config import load_config
    from training.packing import pack_corpus
    from training.tokenizer import train_tokenizer

    texts = folder / "texts"
    texts.mkdir(parents=True)
    source = inspect.getsource(argparse)
    for i in range(24):
        (texts / f"{i:02}.txt").write_text(source[3000 * i : 3000 * i + 3000], encoding="utf-8")
    path = folder / "run.yaml"
    path.write_text(CONFIG.replace("TEXTS", str(texts)).replace("FOLDER", str(folder)), encoding="utf-8")
    config = load_config(str(path))
    pack_corpus(config.data, train_tokenizer([p.read_text() for p in sorted(texts.iterdir())], 350, config.data.tokenizer))
    return path


class Drill:
    """Runs of one number of ranks against one undisturbed run of the same."""

    def __init__(self, base: Path, folder: Path, ranks: int, steps: int, rng: random.Random, report: Report) -> None:
        self.base, self.folder, self.ranks, self.steps, self.rng, self.report = base, folder, ranks, steps, rng, report
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.checkpoint", "train"])

    def start(self, name: str, kill: Kill | None = None) -> Job:
        arguments = ["--config", str(self.base), f"run.dir={self.folder / name}", f"train.steps={self.steps}"]
        arguments += [f"checkpoint.every={EVERY}", "checkpoint.keep=2"]
        return Job(self.context, arguments, self.ranks, self.folder / f"{name}.log", kill)

    def undisturbed(self) -> None:
        """The run that the others are compared with."""
        codes = self.start("calm").end()
        assert codes == [0] * self.ranks, f"undisturbed run ended with {codes}, see {self.folder}/calm.log"

    def disturbed(self, name: str, kills: int) -> None:
        """One run with up to `kills` kills; its restarts, and the comparison."""
        self.report.runs += 1
        codes: list[int | None] = []
        for _ in range(kills):
            kill = self._draw(self._newest(name))
            codes = self.start(name, kill).end()
            if codes == [0] * self.ranks:  # over before the moment came
                break
            self._count(name, kill, codes)
        if codes != [0] * self.ranks and (codes := self.start(name).end()) != [0] * self.ranks:
            self._fail(name, f"the last restart ended with {codes}")
        self._compare(name)

    def _draw(self, done: int) -> Kill:
        rng = self.rng
        ranks = tuple(range(self.ranks)) if rng.random() < 0.5 else (rng.randrange(self.ranks),)
        saving = rng.random() < 0.5
        longest = 0.03 if saving else 0.3  # seconds; about as long as a save and a step take
        delays = tuple(rng.uniform(0, longest) for _ in range(self.ranks))
        return Kill(ranks, min(done + rng.randint(1, 2 * EVERY), self.steps), saving, delays)

    def _newest(self, name: str) -> int:
        """Step of the newest whole checkpoint; 0: none."""
        whole = whole_checkpoints(self.folder / name)
        return int(whole[-1].name.removeprefix("step_")) if whole else 0

    def _count(self, name: str, kill: Kill, codes: list[int | None]) -> None:
        r, everyone = self.report, len(kill.ranks) == self.ranks
        trained, newest = _last_step(self.folder / name), self._newest(name)
        if -signal.SIGKILL not in codes or None in codes:
            self._fail(name, f"ranks {kill.ranks} were to be killed, and all ended with {codes}")
        r.kills, r.one_rank, r.all_ranks = r.kills + 1, r.one_rank + (not everyone), r.all_ranks + everyone
        r.while_saving += kill.saving
        r.half_saves += any((self.folder / name / "checkpoints").glob("step_*.tmp"))
        r.from_scratch += not newest
        r.steps_lost.append(trained - newest)
        r.survivors |= {str(code): r.survivors.get(str(code), 0) + codes.count(code) for code in set(codes) - {-9}}
        if trained - newest > 2 * EVERY:  # those since the save, and those of a save in the background that was cut off
            self._fail(name, f"{trained - newest} steps lost")

    def _compare(self, name: str) -> None:
        ours, calm = self.folder / name, self.folder / "calm"
        for key, (got, want) in {"losses": (_curve(ours), _curve(calm)), "tensors": (_bytes(ours), _bytes(calm))}.items():
            if got != want:
                self._fail(name, f"{key} differ from the undisturbed run's")
        shutil.rmtree(ours)

    def _fail(self, name: str, what: str) -> None:
        self.report.failures.append(f"{self.ranks} ranks, run {name}: {what}")


def _last_step(run: Path) -> int:
    path, steps = run / "metrics.jsonl", [0]
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:  # cut off by the kill
            continue
    return steps[-1]


def _curve(run: Path) -> dict[int, tuple[float, float]]:
    from training.metrics import read_metrics

    return {r["step"]: (r["loss"], r["grad_norm"]) for r in read_metrics(run / "metrics.jsonl") if "loss" in r}


def _bytes(run: Path) -> dict[str, bytes]:
    """Every tensor of the newest checkpoint."""
    import torch

    from training.shards import tensor_names
    from training.streaming import ShardReader

    path = whole_checkpoints(run)[-1]
    reader = ShardReader(path)
    return {name: reader.raw(name).view(-1).view(torch.uint8).numpy().tobytes() for name in sorted(tensor_names(path))}


def drill(folder: Path, kills: int, rank_counts: list[int], steps: int, per_run: int, seed: int) -> Report:
    """At least `kills` kills, spread over the numbers of ranks; `per_run` on one run."""
    report, rng = Report(), random.Random(seed)
    base = make_base(folder / "base")
    for place, ranks in enumerate(rank_counts):
        part = Drill(base, folder / str(ranks), ranks, steps, rng, report)
        part.folder.mkdir()
        part.undisturbed()
        goal, run = kills * (place + 1) // len(rank_counts), 0
        while report.kills < goal and run < 10 * kills:
            part.disturbed(f"run{run}", min(per_run, goal - report.kills))
            run += 1
    return report


def main(arguments: list[str] | None = None) -> int:
    """Prints the counts; status 1 when anything was lost."""
    parser = make_parser("drill", __doc__)
    parser.add_argument("--kills", type=at_least(0), default=50, help="over all runs")
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[2, 3, 4], help="processes of a run, in turn")
    parser.add_argument("--steps", type=at_least(1), default=24, help="of a run")
    parser.add_argument("--per-run", type=at_least(1), default=5, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0, help="of where the kills fall")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        began, report = time.monotonic(), drill(Path(folder), args.kills, args.ranks, args.steps, args.per_run, args.seed)
    print(report.text())
    print(json.dumps(dataclasses.asdict(report) | {"seconds": round(time.monotonic() - began)}))
    for failure in report.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(exit_status(main))
