"""Keys that are set and change nothing: beside the others, or on this device. A run and a dry run say so of each."""

from __future__ import annotations

from parallel.sharded_optimizer import wire_for
from training.config import Config, ParallelConfig
from training.faults import FaultConfig
from training.profile import ProfileConfig


def idle_keys(config: Config, device: str) -> list[str]:
    """A sentence for each such key of a run on `device` ("cpu", "cuda")."""
    optim, profile = config.optim, config.profile
    on_gpus = {"train.cuda_graphs": config.train.cuda_graphs, "optim.offload": optim.offload, "profile.memory": profile.memory}
    found = [f"{key} is for GPUs: it changes nothing on a CPU" for key, value in on_gpus.items() if value and device == "cpu"]
    if not profile.start and profile != ProfileConfig():
        found.append("profile.* is set, but profile.start=0 opens no window")
    if optim.schedule != "wsd" and optim.decay_steps:
        found.append(f"optim.decay_steps is set, but optim.schedule={optim.schedule} does not read it")
    if optim.schedule == "constant" and optim.min_lr_ratio:
        found.append("optim.min_lr_ratio is set, but optim.schedule=constant does not read it")
    if config.faults.policy == "stop" and config.faults.max_streak != FaultConfig().max_streak:
        found.append("faults.max_streak is set, but faults.policy=stop does not read it")
    return config.fp8.idle_keys() + found + _of_parallel(config, device)


def _of_parallel(config: Config, device: str) -> list[str]:
    parallel, default = config.parallel, ParallelConfig()
    found = []
    if parallel.peer_copies and (device == "cpu" or parallel.ep != 2 or parallel.dispatch == "counted"):
        found.append("parallel.peer_copies is for GPUs at parallel.ep=2 with gathered tokens")
    wire = wire_for(parallel.grad_wire, config.fp8.build().is_fp8)
    readers = {
        f"parallel.tp={parallel.tp}": (("tp_wire", "sequence_parallel"), parallel.tp > 1),
        f"parallel.ep={parallel.ep}": (("combine_wire", "dispatch"), parallel.ep > 1),
        f"parallel.zero={parallel.zero}": (("zero_partition", "overlap_gather"), parallel.zero > 0),
        f"parallel.grad_wire={parallel.grad_wire}, which is {wire} here,": (("grad_rounding",), wire == "fp8"),
    }
    for reader, (keys, reads) in readers.items():
        for key in keys if not reads else ():
            if getattr(parallel, key) != getattr(default, key):
                found.append(f"parallel.{key} is set, but {reader} does not read it")
    return found
