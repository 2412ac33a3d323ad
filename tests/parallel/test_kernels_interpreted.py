"""The kernels of parallel/ in Triton's interpreter: the arithmetic and the indexing, without a GPU."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

FILES = ("payload", "grad_wire", "grad_auto_scale", "send_plan")


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    files = [f"tests/parallel/test_{name}_gpu.py" for name in FILES]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
