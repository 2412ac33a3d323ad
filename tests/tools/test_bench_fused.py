"""`tools.bench fused`: how it times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from tools import bench_fused  # noqa: E402


def test_the_copy_that_kernels_are_measured_against_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA graph it takes half as long again, and every share of it would be too high."""

    def timed(run: Callable[[], object], **_: object) -> float:
        run()
        return 2.0  # ms

    monkeypatch.setattr(bench_fused, "do_bench", timed)
    monkeypatch.setattr(bench_fused.torch.cuda, "CUDAGraph", lambda: pytest.fail("a graph"))
    assert bench_fused.rates("cpu", 1 << 20) == pytest.approx((2 * 2**20 / 2e-3 / 1e12, 2**20 / 2e-3 / 1e12))
