"""Settings shared by all tests."""

import os

import hypothesis
import pytest
import torch

# Tensors are tiny here: a second thread only spins. On busy cores that made a test of 1.5 s take 100 s.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start

# Derandomised: the same commit gives the same result. No deadline: a busy machine is no failure.
hypothesis.settings.register_profile("octet", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("octet")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw without a generator of their own draw the same numbers every time."""
    torch.manual_seed(0)
