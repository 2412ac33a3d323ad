"""Runs every command of the documentation: in this process, shortened where it trains, dry where it needs GPUs or a network."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import train
from fp8.recipe import Recipe
from tests.helpers import ROOT
from tests.tools.published import trained
from tools import convert_hf, generate, merge, plan, prepare_data, report, train_tokenizer, wandb_workspace
from training.errors import exit_status
from training.tokenizer import train_tokenizer as make_tokenizer

TOOLS = {
    "convert_hf": convert_hf, "generate": generate, "merge": merge, "plan": plan, "prepare_data": prepare_data, "report": report,
    "train_tokenizer": train_tokenizer, "wandb_workspace": wandb_workspace,
}  # fmt: skip
TEXT = inspect.getsource(argparse)
# What turns a demo of minutes into one of seconds.
SHORT = ["train.steps=2", "train.global_batch=1", "train.micro_batch=1", "optim.warmup_steps=1", "optim.decay_steps=1",
         "log.wandb=off", "eval.samples=1", "eval.sample_tokens=2", "checkpoint.every=1", "model.num_hidden_layers=2",
         "data.seq_len=64", "model.loss_chunk=128"]  # fmt: skip


def commands(document: str) -> list[str]:
    """Lines of the fenced `sh` blocks, and of indented blocks, that start a program; comments cut off."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", text, re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [line[4:] for line in text.splitlines() if line.startswith("    ")]
    lines = [re.split(r"\s{2,}#", line)[0].strip() for line in lines]
    return [line for line in lines if re.match(r"(python|torchrun|make|hf) ", line)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as a reader's checkout would be after the first section: configs, texts, a small corpus and its tokenizer."""
    root, before = tmp_path_factory.mktemp("docs"), os.getcwd()
    shutil.copytree(ROOT / "configs", root / "configs")
    (root / "texts").mkdir()
    for i in range(12):
        (root / f"texts/{i}.txt").write_text(TEXT[5000 * i : 5000 * i + 6000])
    os.chdir(root)
    yield root
    os.chdir(before)


def own_texts(arguments: list[str]) -> list[str]:
    """The demo's corpus replaced by a few files, unless the command names its own."""
    if any(a.startswith("data.source=") for a in arguments):
        return []
    return ["data.source=text", "data.paths=[texts/*.txt]", "data.vocab_size=512"]


def download(folder: Path) -> None:
    """Stands for `hf download`: a tiny checkpoint of the published form, with a tokenizer."""
    make_tokenizer([TEXT], 400, str(folder.parent / "ling.model"))
    trained(folder.parent / "ling_run", Recipe.block(), str(folder.parent / "ling.model"))
    convert_hf.main(["export", str(folder.parent / "ling_run"), str(folder), "--dtype", "bf16"])


def call_train(arguments: list[str], dry: bool, world: int | None = None) -> int:
    if dry:
        ranks = [] if world is None else ["--world-size", str(world)]
        return train.main([*arguments, "--dry-run", *ranks])
    short = SHORT + own_texts(arguments)
    names = {a.partition("=")[0] for a in arguments if not a.startswith(("train.", "optim.decay"))}
    return train.main([*arguments, *(s for s in short if s.partition("=")[0] not in names)])


def execute(line: str) -> int:
    """Exit status of one documented command."""
    program, *arguments = shlex.split(line)
    if program == "hf":
        assert arguments[0] == "download" and arguments[2] == "--local-dir"
        download(Path(arguments[3]))
        return 0
    if program == "make":
        if arguments != ["train"]:
            dry = ["make", "-n", "-C", str(ROOT), *arguments, f"PY={sys.executable}"]
            return subprocess.run(dry, capture_output=True).returncode
        steps = subprocess.run(["make", "-n", "-C", str(ROOT), "train", "PY=python"], capture_output=True, text=True, check=True)
        ours = [s for s in steps.stdout.splitlines() if s.startswith("python ")]
        assert len(ours) == 3
        return max(execute(step.replace("python -m torch.distributed.run --standalone", "torchrun")) for step in ours)
    if program == "torchrun":
        place = arguments.index("train.py")
        options = dict(zip(arguments[:place:2], arguments[1:place:2], strict=True))
        world = int(options.get("--nproc-per-node", 1)) * int(options.get("--nnodes", 1))
        config = arguments[arguments.index("--config") + 1]
        return call_train(arguments[place + 1 :], dry="ling" in config or "small" in config, world=world)
    if arguments[0] == "train.py":
        return call_train(arguments[1:], dry="--dry-run" in arguments)
    assert arguments[0] == "-m", line
    tool = TOOLS[arguments[1].removeprefix("tools.")]
    rest = arguments[2:]
    if tool in (train_tokenizer, prepare_data) and "ling" not in line:
        rest += own_texts(rest)
    return exit_status(lambda: tool.main(rest)) or 0


def test_every_command_of_the_usage_page_runs(workplace: Path) -> None:
    lines = commands("docs/usage.md")
    assert len(lines) > 15
    for line in lines:
        assert execute(line) == 0, line
    for made in ("runs/tiny/report/report.html", "comparison/report.html", "exported/model.safetensors.index.json"):
        assert (workplace / made).is_file()


@pytest.mark.parametrize("document", ["README.md", "docs/data.md", "docs/parallelism.md"])
def test_commands_of_other_pages_run(document: str, workplace: Path) -> None:
    """After the usage page: its run of the demo exists."""
    for line in commands(document):
        assert execute(line) == 0, line


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
