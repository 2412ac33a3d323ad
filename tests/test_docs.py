"""Runs every command of the documentation: in this process, shortened where it trains, dry where it needs GPUs or a network."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import train
from fp8.recipe import Recipe
from tests.helpers import ROOT
from tests.tools.published import trained
from tools import convert_hf, generate, merge, plan, prepare_data, report, train_tokenizer, wandb_workspace
from training.config import load_config
from training.errors import UserError, exit_status
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
        assert arguments[0] == "download" and arguments[-2] == "--local-dir"
        named, folder = arguments[2:-2], Path(arguments[-1])
        if not named:
            download(folder)
        for name in named:  # single files of a model: those of the one above
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(next(Path("data").glob(f"Ling*/{name}")), folder)
        return 0
    if program == "make":
        if arguments != ["train"]:
            dry = ["make", "-n", "-C", str(ROOT), *arguments, f"PY={sys.executable}"]
            return subprocess.run(dry, capture_output=True).returncode
        steps = subprocess.run(["make", "-n", "-C", str(ROOT), "train", "PY=python"], capture_output=True, text=True, check=True)
        ours = [s for s in steps.stdout.splitlines() if s.startswith("python ")]
        assert len(ours) == 3
        return max(execute(step.replace("python -m torch.distributed.run --standalone", "torchrun")) for step in ours)
    if "train.py" not in arguments and not any(a.removeprefix("tools.") in TOOLS for a in arguments):
        check_command(line)  # a benchmark
        return 0
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
    if tool in (train_tokenizer, prepare_data):
        rest += own_texts(rest)
    return exit_status(lambda: tool.main(rest)) or 0


def test_every_command_of_the_usage_page_runs(workplace: Path) -> None:
    lines = commands("docs/usage.md")
    assert len(lines) > 15
    for line in lines:
        assert execute(line) == 0, line
    for made in ("runs/tiny/report/report.html", "runs/comparison/report.html", "runs/exported/model.safetensors.index.json"):
        assert (workplace / made).is_file()


@pytest.mark.parametrize("document", ["README.md", "docs/data.md", "docs/parallelism.md"])
def test_commands_of_other_pages_run(document: str, workplace: Path) -> None:
    """After the usage page: its run of the demo exists."""
    for line in commands(document):
        assert execute(line) == 0, line


# ---------------------------------------------------------------- every page: what each command asks for exists

START = r"(?:\w+=\S+ )*(?:srun )?(?:python|torchrun|make|pytest|hf) "


def every_command(document: str) -> list[str]:
    """Commands of blocks and of inline code, however they are wrapped, without variables set in front, `srun`, pipes and `&`."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    if document.endswith(".py"):  # its docstring, without optional parts and remarks
        text = re.sub(r" \[[^]]*\](?= |$)", "", ast.get_docstring(ast.parse(text), clean=False) or "", flags=re.M)
        text = re.sub(r"(?<=\S) {2,}.*| <.*", "", text)
    blocks = re.findall(r"```(?:sh|bash)?\n(.*?)```", text, re.S)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if line.startswith("    ")]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]
    lines = [re.split(r"\s{2,}#|\s+[|>&]+(?:\s|$)", line)[0].strip() for line in lines if re.match(START, line)]
    return [re.sub(r"^(?:\w+=\S+ )*(?:srun )?", "", line) for line in dict.fromkeys(lines)]


class Parsed(Exception):
    """A tool has understood its arguments."""


def understood(module: str, arguments: list[str]) -> argparse.Namespace:
    """The arguments as the tool's own parser reads them; the tool goes no further. SystemExit: it does not know one."""

    def stop(parse: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
        def call(parser: argparse.ArgumentParser, args: list[str] | None = None, namespace: None = None) -> argparse.Namespace:
            raise Parsed(parse(parser, args, namespace))

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *arguments])
        for name in ("parse_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, stop(getattr(argparse.ArgumentParser, name)))
        tool = importlib.import_module(module)
        try:
            tool.main() if not inspect.signature(tool.main).parameters else tool.main(arguments)
        except Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f"{module} parses nothing")


def check_command(line: str) -> None:
    """Raises where a file, an option or a key that the command names does not exist."""
    program, *arguments = shlex.split(re.sub(r"\$\{?\w+\}?", "4", line))
    if program == "make":
        done = subprocess.run(["make", "-n", "-C", str(ROOT), *arguments, "PY=python"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif program == "pytest":
        paths = [a.partition("::")[0] for a in arguments if a.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths), paths
    elif program == "torchrun" and not {"train.py", "-m"} & set(arguments):
        assert not any(a.endswith(".py") for a in arguments)  # a fragment that names an option of torchrun's
    elif program in ("python", "torchrun"):
        world = 1
        if program == "torchrun":
            place = min(arguments.index(a) for a in ("train.py", "-m") if a in arguments)
            options = dict(zip(arguments[:place:2], arguments[1:place:2], strict=True))
            world = int(options.get("--nproc-per-node", 1)) * int(options.get("--nnodes", 1))
            arguments = arguments[place:]
        if arguments[0] == "-c":
            compile(arguments[1], line, "exec")
        elif arguments[0] == "train.py":
            assert train.main([*arguments[1:], "--dry-run", *(["--world-size", str(world)] if program == "torchrun" else [])]) == 0
        elif len(arguments) == 2:  # the name of a tool, in a sentence
            assert importlib.util.find_spec(arguments[1]) is not None
        elif arguments[1] == "pytest":
            check_command(shlex.join(arguments[1:]))
        else:
            found = understood(arguments[1], arguments[2:])
            if getattr(found, "overrides", None) is not None and found.config is not None:
                load_config(found.config, [*found.overrides])


PAGES = ["README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
SOURCES = ["train.py", *sorted(f"tools/{p.name}" for p in (ROOT / "tools").glob("*.py"))]


# The commands of the usage page are executed, above. Of the sources: those in docstrings and comments.
@pytest.mark.parametrize("document", [name for name in PAGES + SOURCES if name != "docs/usage.md"])
def test_every_command_is_understood(document: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the benchmarks that need a GPU: their options are parsed, their config files loaded with their keys."""
    monkeypatch.chdir(ROOT)
    lines = [line for line in every_command(document) if "..." not in line]
    for line in lines:
        try:
            check_command(line)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"{document}: {line}: {error} {capsys.readouterr().err}") from error


def test_no_command_escapes() -> None:
    """Nothing that looks like a command stands where `every_command` does not look."""
    counts = {page: len(every_command(page)) for page in PAGES}
    assert sum(counts.values()) > 60
    assert all(counts[f"docs/{page}.md"] for page in ("performance", "numerics", "parallelism", "reliability"))
    for page in PAGES:
        text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ").split())
        found = " ".join(" ".join(every_command(page)).split())
        for tool in set(re.findall(r"(?:python|torchrun)[^`|]{0,80}? -m (tools\.\w+(?: [a-z]+\b)?)", text)):
            assert tool in found, f"{page}: {tool}"


WRONG = (
    "python -m tools.plan --config configs/tiny.yaml --gpuss 8",
    "python -m tools.bench kernels --roundz 3",
    "python -m tools.compare --config configs/nope.yaml --recipes block",
    "python train.py --config configs/tiny.yaml train.stepz=3",
    "torchrun --nproc-per-node 3 train.py --config configs/tiny.yaml",
    "pytest -m gpu tests/fp8/test_nothing.py",
    "python -m tools.prepare_data --config configs/tiny.yaml data.pathz=[a]",
    "make trian",
)


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_is_found(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((AssertionError, UserError, SystemExit)):
        check_command(line)


def test_the_readme_names_the_versions_that_make_installs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"Python 3\.11 or 3\.12: torch ([\d.]+), and beside its CPU build triton ([\d.]+)\)", text)
    pins = (ROOT / "requirements.txt").read_text(encoding="utf-8") + (ROOT / "Makefile").read_text(encoding="utf-8")
    assert list(found.groups()) == [re.search(rf"\b{name}==(\S+)", pins)[1] for name in ("torch", "triton")]


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
