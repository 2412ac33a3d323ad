"""Command lines of the tools: every option is explained, and what means nothing is refused in one line before anything runs."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT
from tools import arguments, bench, bench_comm, merge
from training.errors import UserError, exit_status

RUNNABLE = [p.stem for p in sorted((ROOT / "tools").glob("*.py")) if "__main__" in p.read_text(encoding="utf-8")]
TOOLS = [name for name in RUNNABLE if name != "bench"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
STEP = "step --config configs/tiny.yaml"


class Reached(Exception):
    """A parser is whole."""


def parser_of(main: object, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise Reached(parser)

    for name in ("parse_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    with pytest.raises(Reached) as reached:
        main([]) if inspect.signature(main).parameters else main()
    return reached.value.args[0]


def options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from options(sub)
        elif action.option_strings:
            yield action


@pytest.mark.parametrize("name", [*TOOLS, *(f"bench {what}" for what in bench.COMMANDS)])
def test_help_names_the_command_and_explains_every_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(bench.COMMANDS[name.split()[1]][0] if " " in name else f"tools.{name}")
    parser = parser_of(module.main, monkeypatch)
    assert parser.prog == f"python -m tools.{name}"
    assert parser.description == module.__doc__ and parser.formatter_class is argparse.RawDescriptionHelpFormatter
    assert not [action.option_strings for action in options(parser) if not action.help]
    assert not [action.option_strings for action in options(parser) if "--json" in action.option_strings], "it is --out"
    parser.format_help()


@pytest.mark.parametrize("name", [*RUNNABLE, *(f"bench {what}" for what in bench.COMMANDS)])
def test_help_is_no_mistake(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module, *rest = name.split()
    monkeypatch.setattr(sys, "argv", [f"tools/{module}.py", *rest, "--help"])
    with pytest.raises(SystemExit) as end:
        exit_status(importlib.import_module(f"tools.{module}").main)
    said = capsys.readouterr()
    assert end.value.code == 0 and said.err == "" and said.out.startswith(f"usage: python -m tools.{name} [-h]")


def test_bench_lists_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, (_, text) in bench.COMMANDS.items():
        assert f"  {name:10} {text}" in lines
    for given, message in (([], "required: what"), (["kernel"], "invalid choice: 'kernel' (choose from ")):
        with pytest.raises(SystemExit) as end:
            bench.main(given)
        assert end.value.code == 2 and message in capsys.readouterr().err


@no_gpu
@pytest.mark.parametrize(("command", "message"), [
    ("step", "needs a CUDA GPU"),
    ("step --config nope.yaml", "cannot read config nope.yaml"),
    ("step --recipes foo", "foo is none of block, "),
    ("step --recipes bf16+keep", "NAME+kept is NAME with fp8.keep_transposed"),
    ("step --states foo", "argument --states: invalid choice: 'foo'"),
    ("step --stage 9", "argument --stage: invalid choice: 9"),
    ("step --batch 0", "argument --batch: 0 is less than 1"),
    (f"{STEP} --layouts foo", "--layouts foo is neither solo nor keys"),
    (f"{STEP} --layouts ep=2,x=1", "x is not a key"),
    (f"{STEP} --layouts ep=two", "ep=two"),
    (f"{STEP} --layouts ep=2", "world size 1 is not a multiple of ep 2; start it with torchrun"),
    (f"{STEP} --layouts solo ep=3 --mirror 2", "world size 2 is not a multiple of ep 3"),
    (f"{STEP} --layouts ep=2,zero=7 --mirror 2", "zero=7 must be from 0 to 2"),
    (f"{STEP} --layouts tp=2 --mirror 2", "with tp=1, not tp=2"),
    (f"{STEP} --mirror 2", "of a layout that --layouts names"),
    (f"{STEP} --mirror 1", "1 is less than 2"),
    (f"{STEP} --graph", "--graph needs a CUDA GPU"),
    (f"{STEP} --chunk 100", "model.loss_chunk = 100 is not a positive multiple of 128"),
    ("memory --recipe foo", "argument --recipe: invalid choice: 'foo'"),
    ("memory --batch 0", "argument --batch: 0 is less than 1"),
    ("memory --stage 7 --sequence-parallel", "argument --stage: invalid choice: 7"),
    ("memory --seq-len 33 --sequence-parallel", "cannot share 1 x 33 tokens"),
    ("memory --device gpu", "argument --device: invalid choice: 'gpu'"),
    ("numerics --sequences 0", "argument --sequences: 0 is less than 1"),
    ("gradients --run x --batches 0", "argument --batches: 0 is less than 1"),
    ("gradients --run x --recipes block,block", "block stands twice"),
    ("reduction --config configs/tiny.yaml --at x", "argument --at: invalid"),
    ("reduction --config configs/tiny.yaml --at 0,1", "argument --at: 0 is less than 1"),
    ("reduction --config configs/tiny.yaml --ranks 1", "argument --ranks: 1 is less than 2"),
    ("states --spread nan", "nan is not a number above 0"),
    ("optimizer --params 0", "0 is not a number above 0"),
    ("layer --recipes foo", "foo is none of block, "),
    ("layer --rounds 0", "argument --rounds: 0 is less than 1"),
    ("kernels --tokens 0", "argument --tokens: 0 is less than 1"),
    ("fused --tokens 0", "argument --tokens: 0 is less than 1"),
    ("comm", "start it with torchrun --nproc-per-node 2"),
    ("comm --model --experts 7", "model.num_experts = 7 is not divisible by model.n_group = 8"),
    ("comm --model --ranks 3", "--experts 256 is not a multiple of 3 ranks"),
    ("comm --model --hidden 100", "--hidden 100 is not a multiple of 128"),
    ("comm --model --params 1000", "--params 1000 is not a multiple of 128 x 2 ranks = 256"),
    ("comm --model --tokens 33", "--tokens 33 is not a multiple of --tp 2"),
    ("comm --model --rounds 0", "argument --rounds: 0 is less than 1"),
    ("comm --model --tokens 0", "argument --tokens: 0 is less than 1"),
])  # fmt: skip
def test_what_means_nothing_is_refused(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["bench", *command.split()])
    try:
        status = exit_status(bench.main)
    except SystemExit as end:  # argparse's own
        status = end.code
    said = capsys.readouterr()
    assert status == 2 and said.out == ""
    assert message in said.err.splitlines()[-1]


@no_gpu
@pytest.mark.parametrize(("given", "message"), [
    ("--params 65536", "--params 65536 is not a multiple of 262144 x 2 ranks = 524288"),
    ("--experts 33 --groups 1 --topk-groups 1", "--experts 33 is not a multiple of 2 ranks"),
    ("--peer-copies", "--peer-copies needs a CUDA GPU"),
])  # fmt: skip
def test_ranks_refuse_before_they_meet(
    given: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one rank meets on its own leaves the other waiting for it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(bench_comm, "build_mesh", lambda *_, **__: pytest.fail("the ranks have met"))
    monkeypatch.setattr(sys, "argv", ["bench", "comm", *given.split()])
    assert exit_status(bench.main) == 2
    assert message in capsys.readouterr().err


def test_small_sizes_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`comm --model` as it stands ends within seconds on a CPU, and --out makes its folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "new" / "comm.json"
    monkeypatch.setattr(sys, "argv", ["bench", "comm", "--model", "--out", str(out)])
    assert exit_status(bench.main) == 0
    said = capsys.readouterr().out
    assert "dispatch x" in said and all(" - " in line for line in said.splitlines()[2:]), "casts and packing are not measured"
    assert '"leg": "weights"' in out.read_text(encoding="utf-8")


def test_types_of_options() -> None:
    assert arguments.at_least(2)("2") == 2 and arguments.positive("2e9") == 2e9
    assert arguments.names("") == [] and arguments.names("bf16,block") == ["bf16", "block"]
    assert arguments.whole_numbers(0)("3,0,12") == [3, 0, 12]
    assert arguments.contender("block+kept") == "block+kept"
    assert arguments.recipe_of("block+kept")[1] and arguments.recipe_of("block+kept")[0].name == "block"
    assert not arguments.recipe_of("bf16")[1]
    for convert, text in ((arguments.positive, "inf"), (arguments.names, "a,b,a"), (arguments.whole_numbers(0), "")):
        with pytest.raises(argparse.ArgumentTypeError):
            convert(text)
    with pytest.raises(UserError, match="--recipes: block stands there twice"):
        arguments.refuse_repeated("--recipes", ["block", "bf16", "block"])
    blocked = ROOT / "README.md" / "rows.json"
    with pytest.raises(UserError, match="cannot write --out"):
        arguments.write_json(blocked, [])


def test_a_merge_of_one_says_how_many_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        merge.main("merged runs/tiny --last 1".split())
    assert "argument --last: 1 is less than 2" in capsys.readouterr().err
