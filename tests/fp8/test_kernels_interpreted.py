"""The fused kernels' own tests, in Triton's interpreter: the arithmetic and the indexing, without a GPU."""

import pytest

from tests.helpers import run_gpu_tests_interpreted

FILES = ("swiglu", "permute", "gradient", "rms_norm", "cross_entropy", "embedding", "qk_norm_rope", "route", "placement")


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_gpu_tests_interpreted(f"tests/fp8/test_{name}_gpu.py" for name in FILES)
