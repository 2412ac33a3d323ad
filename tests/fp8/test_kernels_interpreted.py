"""The fused kernels' own tests, in Triton's interpreter: the arithmetic and the indexing, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("swiglu", "permute", "gradient", "rms_norm", "cross_entropy", "embedding", "qk_norm_rope", "route")


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    files = [f"tests/fp8/test_{name}_gpu.py" for name in FILES]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
