"""tools.reference_arithmetic leaves no kernel's switch out, and puts everything back."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from fp8.quantize import quantize
from fp8.recipe import Recipe
from tools.reference_arithmetic import CHOOSERS, CONDITIONS, reference_arithmetic

ROOT = Path(__file__).parents[2]


def test_every_module_that_chooses_kernels_is_covered() -> None:
    found = {f"fp8.{path.stem}" for path in (ROOT / "fp8").glob("*.py") if "def _kernels(" in path.read_text(encoding="utf-8")}
    assert found == {module.__name__ for module, name in CHOOSERS if name == "_kernels"}


def test_all_is_as_before_afterwards() -> None:
    before = [getattr(module, name) for module, name in CHOOSERS + CONDITIONS]
    with reference_arithmetic():
        assert all(getattr(m, n)(None, None) in (None, False) for m, n in CHOOSERS + CONDITIONS)
    assert [getattr(module, name) for module, name in CHOOSERS + CONDITIONS] == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_kernel_runs_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = importlib.import_module("fp8.quantize_kernels")
    monkeypatch.setattr(kernels, "quantize_rows", lambda x: pytest.fail("a kernel ran"))
    with reference_arithmetic():
        quantize(torch.randn(128, 128, device="cuda"), Recipe.block().activation)
