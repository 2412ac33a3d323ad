"""NCCL's flight recorder: what the last collectives were when a rank hangs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import ROOT

# a rank that never comes
HANG = """
import os, time, torch
from parallel.collectives import all_reduce
from parallel.mesh import build_mesh
from training.watchdog import record_collectives
record_collectives(os.environ["FOLDER"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
mesh, one = build_mesh(1, 1, device, timeout_s=5.0), torch.ones(1, device=device)
all_reduce(one, mesh.world, "test")
torch.cuda.synchronize()
if mesh.world.rank == 1:
    time.sleep(60)
all_reduce(one, mesh.world, "test")
torch.cuda.synchronize()
"""


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_flight_recorder_writes_when_a_rank_hangs(tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(HANG)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "hang.py")]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "FOLDER": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode != 0
    trace = pickle.loads((tmp_path / "nccl_trace_rank_0").read_bytes())  # our own
    last = trace["entries"][-1]
    print("flight recorder:", last["profiling_name"], last["state"])
    assert "all_reduce" in last["profiling_name"] and last["state"] != "completed"
