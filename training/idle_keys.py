"""Keys that are set and change nothing: beside the others, on this device, on so many ranks. A run and a dry run say so of each.

Not of what a switch beside them turns off as a whole (`checkpoint.every=0`, `eval.samples=0`, `log.wandb=off`): a run that is told
to save nothing on the command line still has the file's `checkpoint.keep`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from model.config import ModelConfig
from parallel.sharded_optimizer import wire_for
from training.config import Config
from training.corpus import DataConfig
from training.faults import FaultConfig
from training.profile import ProfileConfig


def idle_keys(config: Config, device: str, world_size: int) -> list[str]:
    """A sentence for each such key of a run on `world_size` ranks of `device` ("cpu", "cuda"); keys of one reason share it."""
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
    if not config.model.num_nextn_predict_layers and config.model.mtp_loss_weight != ModelConfig().mtp_loss_weight:
        found.append("model.mtp_loss_weight is set, but model.num_nextn_predict_layers=0 leaves nothing to weigh")
    return config.fp8.idle_keys() + found + _of_data(config.data) + _of_parallel(config, device, world_size)


def _of_data(data: DataConfig) -> list[str]:
    hub = data.source == "hub"
    read = dict.fromkeys(("hub_name", "hub_config", "hub_split", "streaming"), hub)
    read["text_key"] = hub or data.source in ("jsonl", "parquet")
    return _not_read("data", data, [key for key, is_read in read.items() if not is_read], f"data.source={data.source}")


def _not_read(name: str, section: object, keys: Iterable[str], reader: str) -> list[str]:
    """One sentence of those `keys` of the section `name` that are not at their defaults; none when all are."""
    default = {field.name: field.default for field in fields(section)}
    found = [f"{name}.{key}" for key in keys if getattr(section, key) != default[key]]
    are, them = ("is", "it") if len(found) == 1 else ("are", "them")
    return [f"{', '.join(found)} {are} set, but {reader} does not read {them}"] if found else []


def _of_parallel(config: Config, device: str, world_size: int) -> list[str]:
    parallel, found = config.parallel, []
    if parallel.peer_copies and (device == "cpu" or parallel.ep != 2 or parallel.dispatch == "counted"):
        found.append("parallel.peer_copies is for GPUs at parallel.ep=2 with gathered tokens")
    wire = wire_for(parallel.grad_wire, config.fp8.build().is_fp8)
    alone, simulated = world_size == 1, parallel.simulated_ranks > 0
    readers = [
        (("tp_wire", "sequence_parallel"), parallel.tp > 1, f"parallel.tp={parallel.tp}"),
        (("combine_wire", "dispatch"), parallel.ep > 1, f"parallel.ep={parallel.ep}"),
    ]
    if alone and not simulated:  # nothing is shared or travels
        readers.append((("zero", "zero_partition", "overlap_gather", "grad_wire", "grad_rounding"), False, "one rank"))
    else:
        owners = "one rank" if alone else f"parallel.zero={parallel.zero}"
        readers.append((("zero_partition", "overlap_gather"), parallel.zero > 0 and not alone, owners))
        readers.append((("grad_rounding",), wire == "fp8", f"parallel.grad_wire={parallel.grad_wire}, which is {wire} here,"))
    for keys, reads, reader in readers:
        found += [] if reads else _not_read("parallel", parallel, keys, reader)
    return found
