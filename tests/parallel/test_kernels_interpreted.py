"""The kernels of parallel/ in Triton's interpreter: the arithmetic and the indexing, without a GPU."""

import pytest

from tests.helpers import run_gpu_tests_interpreted

FILES = ("payload", "grad_wire", "grad_auto_scale", "send_plan")


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_gpu_tests_interpreted(f"tests/parallel/test_{name}_gpu.py" for name in FILES)
