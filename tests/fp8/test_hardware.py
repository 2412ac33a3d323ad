"""What runs where, and what is said when it does not."""

from __future__ import annotations

import pytest

from fp8.config import Fp8Config
from fp8.hardware import ARCHS, MATRIX, Machine, check, machine_of, matrix_table, nearest_native
from fp8.recipe import RECIPES
from training.config import Config
from training.metrics import Metrics

DEVICES = {
    "V100": Machine((7, 0), (12, 9)),
    "A100": Machine((8, 0), (12, 9)),
    "L40": Machine((8, 9), (12, 9)),
    "H200": Machine((9, 0), (13, 0)),
    "H100, CUDA 12.8": Machine((9, 0), (12, 8)),
    "B200": Machine((10, 0), (13, 0)),
    "RTX 5090": Machine((12, 0), (13, 0)),
}
# recipe -> devices that multiply its operands as they are
NATIVE = {
    "tensorwise_current": {"L40", "H200", "H100, CUDA 12.8", "B200", "RTX 5090"},
    "block": {"H200"},
    "auto": {"H200"},
    "mx": {"B200"},
    "bf16": set(DEVICES) - {"V100"},
    "fp32": set(DEVICES),
}
NATIVE |= {name: NATIVE["tensorwise_current"] for name in ("tensorwise_delayed", "static")}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_matrix(recipe: str, device: str) -> None:
    verdict = check(recipe, DEVICES[device])
    assert verdict.kind == ("native" if device in NATIVE[recipe] else "refused")
    if verdict.kind == "refused":
        assert verdict.nearest and check(verdict.nearest, DEVICES[device]).kind == "native"
        assert recipe in verdict.reason and verdict.nearest in verdict.reason and "emulate" in verdict.reason


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cpu_runs_everything_in_reference_arithmetic(recipe: str) -> None:
    verdict = check(recipe, Machine(None))
    assert verdict.kind == "reference" and not verdict.log_prefix(recipe)


def test_refusals_name_the_reason_and_the_nearest_recipe() -> None:
    mx = check("mx", DEVICES["H200"])
    assert "slower than BF16" in mx.reason and mx.nearest == "block" and "SM90" in mx.reason
    old = check("block", DEVICES["H100, CUDA 12.8"])
    assert "12.9" in old.reason and old.nearest == "tensorwise_current"
    assert check("block", DEVICES["B200"]).nearest == "mx"
    assert check("block", DEVICES["L40"]).nearest == "tensorwise_current"
    assert check("tensorwise_delayed", DEVICES["A100"]).nearest == "bf16"


def test_emulation_runs_it_and_says_so_on_each_line() -> None:
    verdict = check("mx", DEVICES["H200"], emulate=True)
    assert verdict.kind == "emulated" and verdict.log_prefix("mx") == "[emulated mx] "
    assert not check("block", DEVICES["H200"], emulate=True).log_prefix("block"), "what is native is not emulated"


def test_the_console_prefix_stands_before_every_line(capsys: pytest.CaptureFixture) -> None:
    metrics = Metrics(Config(), active=True)
    metrics.prefix = check("mx", DEVICES["H200"], emulate=True).log_prefix("mx")
    metrics.say("step 1")
    metrics.warn("careful")
    printed = capsys.readouterr()
    assert printed.out == "[emulated mx] step 1\n" and printed.err == "[emulated mx] warning: careful\n"


def test_old_torch_is_refused_everywhere() -> None:
    for machine in (Machine(None, torch=(2, 10)), Machine((9, 0), (13, 0), (2, 8))):
        assert check("bf16", machine).kind == "refused" and "2.11" in check("bf16", machine).reason


def test_a_run_is_admitted_or_refused_with_its_overrides() -> None:
    h200 = DEVICES["H200"]
    assert Fp8Config(recipe="block", overrides={"head": "bf16"}).admit(h200) == ""
    with pytest.raises(ValueError, match="mx cannot run"):
        Fp8Config(recipe="block", overrides={"head": "MXFP8BlockScaling"}).admit(h200)
    assert Fp8Config(recipe="MXFP8BlockScaling", emulate=True).admit(h200) == "[emulated mx] "


def test_every_recipe_and_architecture_stands_in_the_table() -> None:
    assert set(MATRIX) == set(RECIPES)
    table = matrix_table()
    assert all(f"| {name} |" in table for name in RECIPES) and all(arch in table for arch in ARCHS)


def test_nearest_is_reached_over_several_hops() -> None:
    assert nearest_native("auto", DEVICES["A100"]) == "bf16"
    assert nearest_native("mx", DEVICES["H100, CUDA 12.8"]) == "tensorwise_current"
    assert nearest_native("block", DEVICES["V100"]) == "fp32"


def test_architectures_between_the_listed_ones() -> None:
    assert Machine((10, 3)).arch == "SM100" and Machine((12, 1)).arch == "SM120" and Machine((8, 6)).arch == "SM80"


def test_this_machine_is_recognised() -> None:
    import torch

    assert machine_of(torch.device("cpu")).arch == "CPU"
