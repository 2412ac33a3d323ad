"""Settings shared by all tests."""

import hypothesis
import pytest
import torch

# Derandomised: the same commit gives the same result. No deadline: a busy machine is no failure.
hypothesis.settings.register_profile("octet", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("octet")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Tests that draw without a generator of their own draw the same numbers every time."""
    torch.manual_seed(0)
