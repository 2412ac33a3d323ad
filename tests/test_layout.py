"""The shape of the repository: who imports whom, where matrices are multiplied, and that the README's tree is the disk."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT

LAYERS = ("fp8", "parallel", "model", "training", "tools")  # each may import itself and those before it
PLAIN = ("fp8", "parallel", "model")  # folders that need nothing but torch, triton and numpy
MATMULS = {"matmul", "mm", "bmm", "einsum", "addmm", "baddbmm", "mv", "tensordot", "grouped_mm", "_grouped_mm", "scaled_mm",
           "_scaled_mm", "scaled_grouped_mm", "_scaled_grouped_mm"}  # fmt: skip
SOURCES = sorted(p for layer in LAYERS for p in (ROOT / layer).rglob("*.py")) + [ROOT / "train.py"]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            yield node.lineno, node.module.partition(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_one_way(path: Path) -> None:
    own = LAYERS.index(path.relative_to(ROOT).parts[0]) if path.parent != ROOT else len(LAYERS)
    for line, package in imports(path):
        place = f"{name_of(path)}:{line} imports {package}"
        assert package != "tests", place
        assert package not in LAYERS or LAYERS.index(package) <= own, place
        if own < len(PLAIN):
            plain = package in LAYERS or package in ("torch", "triton", "numpy") or package in sys.stdlib_module_names
            assert plain, f"{place}: {', '.join(PLAIN)} need only torch, triton and numpy"
        assert package != "pydantic" or name_of(path) == "training/config_loading.py", place


def raw_matmuls(node: ast.AST, inside_ref: bool = False) -> Iterator[tuple[int, str]]:
    """(line, what) of matrix products outside functions named *_ref."""
    for child in ast.iter_child_nodes(node):
        inside = inside_ref or (isinstance(child, ast.FunctionDef) and child.name.endswith("_ref"))
        if not inside and isinstance(child, ast.BinOp | ast.AugAssign) and isinstance(child.op, ast.MatMult):
            yield child.lineno, "@"
        if not inside and isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            function, owner = child.func.attr, child.func.value
            if function in MATMULS or (function == "linear" and isinstance(owner, ast.Name) and owner.id in ("F", "functional")):
                yield child.lineno, function
        yield from raw_matmuls(child, inside)


# Benchmarks time the library's products beside ours.
@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name != "fp8" and not p.name.startswith("bench")], ids=name_of)
def test_matrices_are_multiplied_in_fp8_only(path: Path) -> None:
    """Everything else goes through its GEMMs. The attention core is the one exception, and SDPA is no matmul by name."""
    found = [f"{name_of(path)}:{line}: {what}" for line, what in raw_matmuls(ast.parse(path.read_text()))]
    assert not found, f"raw products outside fp8/ and *_ref functions: {found}"


def test_the_rules_see_what_they_forbid() -> None:
    source = "def f(a, b):\n    x = a @ b\n    y = F.linear(a, b)\n    z = a.matmul(b)\n    return linear(a, b)\n"
    assert [what for _, what in raw_matmuls(ast.parse(source))] == ["@", "linear", "matmul"]
    assert not list(raw_matmuls(ast.parse(source.replace("def f(", "def f_ref("))))


def test_packages_hold_no_code() -> None:
    for path in ROOT.glob("*/**/__init__.py"):
        if ".venv" not in path.parts:
            body = ast.parse(path.read_text()).body
            assert all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in body), name_of(path)


def tree_on_disk() -> set[str]:
    """What the README's tree lists, file by file."""
    found = {name_of(p) for p in SOURCES}
    return found | {name_of(p) for folder, kind in (("configs", "yaml"), ("docs", "md")) for p in (ROOT / folder).glob(f"*.{kind}")}


def tree_in_readme(text: str) -> set[str]:
    """Files of the first code block after "## Files": a line `folder/ a.py b.py` opens a folder, indented lines go on with it."""
    block = text.partition("## Files")[2].partition("```")[2].partition("```")[0]
    found, folder = set(), ""
    for line in block.splitlines():
        opened = re.match(r"(\w+/)", line)
        if not line.startswith(" "):
            folder = opened.group(1) if opened else ""
        found |= {folder + name for name in re.findall(r"(?<![\w/.*])[\w-]+\.(?:py|yaml|md)\b", line)}
    return {name for name in found if name.partition("/")[0] in (*LAYERS, "configs", "docs", "train.py")}


def test_readme_tree_is_the_disk() -> None:
    listed, there = tree_in_readme((ROOT / "README.md").read_text()), tree_on_disk()
    assert listed == there, f"only in the README: {sorted(listed - there)}; only on disk: {sorted(there - listed)}"


def test_the_reading_order_is_an_afternoon() -> None:
    """The README says how many lines its reading order has, and how many the rest."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = {name_of(p): len(p.read_text().splitlines()) for p in SOURCES}
    order, folder = [], ""
    for name in re.findall(r"`([\w/]+\.py)`", readme.partition("## Reading order")[2].partition("\n\n")[2].partition("\n\n")[0]):
        folder = name.rpartition("/")[0] or ("" if name == "train.py" else folder)
        order.append(name if "/" in name or not folder else f"{folder}/{name}")
    read = sum(lines[name] for name in order)
    assert len(order) > 15 and abs(read - 3000) < 250, (read, order)
    assert abs(sum(lines.values()) - read - 24000) < 1000, sum(lines.values()) - read
