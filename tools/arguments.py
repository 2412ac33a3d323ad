"""What the command lines of the tools share: their parsers, and types of options that refuse in one line what means nothing."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from training.errors import UserError

if TYPE_CHECKING:
    from fp8.recipe import Recipe
    from model.config import ModelConfig

STAGES = range(5)  # of activations (model/policy.py)

RECIPES_HELP = "fp8.recipe, one or several; NAME+kept (block+kept): with fp8.keep_transposed"


def make_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """Of `python -m tools.NAME`, described by its module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m tools.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """`--out FILE`, for `write_json`."""
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the figures here, as JSON")


def write_json(path: Path | None, value: object) -> None:
    """Writes `value` where a path is given. Raises UserError when the disk does not take it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write --out {path}: {error.strerror or error}") from error


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` on."""

    def count(text: str) -> int:
        if (value := int(text)) < low:
            raise argparse.ArgumentTypeError(f"{value} is less than {low}")
        return value

    return count


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def repeated(given: Iterable[str]) -> str:
    """Which of `given` stand there more than once, as a text."""
    given = list(given)
    return ", ".join(name for name in dict.fromkeys(given) if given.count(name) > 1)


def refuse_repeated(option: str, given: Iterable[str]) -> None:
    """Raises UserError when a name stands twice: its second result would take the first one's place."""
    if twice := repeated(given):
        raise UserError(f"{option}: {twice} stands there twice")


def names(text: str) -> list[str]:
    """An argparse type: names with commas between them, none of them twice."""
    found = [name for name in text.split(",") if name]
    if twice := repeated(found):
        raise argparse.ArgumentTypeError(f"{twice} stands twice in {text}")
    return found


def whole_numbers(low: int) -> Callable[[str], list[int]]:
    """An argparse type: whole numbers from `low` on with commas between them, none of them twice."""

    def numbers(text: str) -> list[int]:
        if not (found := [at_least(low)(number) for number in names(text)]):
            raise argparse.ArgumentTypeError("no number is given")
        return found

    return numbers


def contender(text: str) -> str:
    """An argparse type: a recipe's name, `+kept` after it where its weights keep their transposes (fp8.keep_transposed)."""
    from fp8.recipe import RECIPES

    if text.removesuffix("+kept") not in RECIPES:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(RECIPES)}; NAME+kept is NAME with fp8.keep_transposed")
    return text


def recipe_of(text: str) -> tuple[Recipe, bool]:
    """(recipe, whether its weights keep their transposes) of a `contender`."""
    from fp8.recipe import recipe_named

    return recipe_named(text.removesuffix("+kept")), text.endswith("+kept")


def model_of(path: str) -> ModelConfig:
    """The model of a run's config file. Raises UserError for a file that is not there, or not a run's."""
    from training.config import load_config  # needs pydantic, which built-in models do without

    return load_config(path).model


def possible(config: ModelConfig) -> ModelConfig:
    """`config`, changed by options. Raises UserError when no such model can be built."""
    if problems := config.problems():
        raise UserError("no such model: " + "; ".join(problems))
    return config
