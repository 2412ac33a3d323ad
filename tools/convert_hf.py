"""Published BailingMoeV2 folders (Ling-mini/flash/1T, Ring) to octet checkpoints and back, a tensor at a time.

    python -m tools.convert_hf import data/Ling-mini-base-2.0 data/imported/ling_mini [--mtp drop]
    python -m tools.convert_hf export runs/ling_mini runs/exported [--dtype auto|bf16|fp8|fp32] [--mtp drop]

`export` takes a run, one of its checkpoints, or an import. Memory stays within a few GB whatever the model. The output appears
under its name only when it is whole.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from model.config import ModelConfig
from model.counts import parameter_counts
from tools.arguments import make_parser
from tools.hf_export import export_hf, open_source
from tools.hf_import import import_hf
from tools.output import whole_or_nothing
from training.errors import UserError, exit_status


def _convert(out: Path, work: Callable[[Path, Callable[[int], object]], ModelConfig]) -> None:
    with whole_or_nothing(out) as partial, tqdm(unit="param", unit_scale=True, desc="converting", disable=None) as bar:
        config = work(partial, bar.update)
    counts = parameter_counts(config)
    mtp = f" and {counts['mtp']:,} of MTP" if counts["mtp"] else ""
    print(f"wrote {out}: {counts['total']:,} parameters{mtp}")


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser("convert_hf", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source, help_ in (
        ("import", "folder with config.json and safetensors", "Hugging Face -> checkpoint"),
        ("export", "run, checkpoint or import", "checkpoint -> Hugging Face"),
    ):
        command = commands.add_parser(name, help=help_)
        command.add_argument("source", help=source)
        command.add_argument("out", type=Path, help="folder to make; must not exist or be empty")
        command.add_argument("--mtp", choices=("keep", "drop"), default="keep", help="the multi-token prediction layer")
    command.add_argument("--dtype", choices=("auto", "bf16", "fp8", "fp32"), default="auto", help="see tools/hf_export.py")
    command.add_argument("--tokenizer", help="file or folder to carry along, or `none`; default: the run's or the import's")
    command.add_argument("--shard-gb", type=float, default=5.0, help="largest safetensors file, in 10^9 bytes")
    options = parser.parse_args(arguments)
    drop = options.mtp == "drop"
    if options.command == "import":
        _convert(options.out, lambda out, bar: import_hf(Path(options.source), out, options.out, drop, bar))
        print(f"continue training: torchrun train.py --config {options.out}/train.yaml")
        return
    if not 1e-6 <= options.shard_gb <= 1e6:
        raise UserError(f"--shard-gb {options.shard_gb} is no size of a file")
    source = open_source(options.source, drop, lambda message: print(f"warning: {message}", file=sys.stderr))
    shard_bytes = int(options.shard_gb * 1e9)
    _convert(options.out, lambda out, bar: export_hf(source, out, options.dtype, options.tokenizer, shard_bytes, bar))


if __name__ == "__main__":
    sys.exit(exit_status(main))
