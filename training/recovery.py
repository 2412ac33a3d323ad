"""After a bad step: what the policy says, done."""

from __future__ import annotations

from training.checkpoint import Checkpointer
from training.faults import Guard
from training.metrics import Metrics


def recover(problem: str, step: int, guard: Guard, checkpointer: Checkpointer, metrics: Metrics) -> int | None:
    """Reports the bad step `step` and, under `faults.policy=rollback`, restores the newest checkpoint. Every rank calls it.

    Returns:
        The step that the run is back at; None where the step is only passed over. The data goes on in both cases.

    Raises:
        BadStepError: the policy is to stop, or gives up.
        UserError: no checkpoint can be read.
    """
    metrics.warn(problem)
    metrics.event("bad_step", step, problem=problem)
    checkpointer.settle(metrics.warn)  # so that every rank knows the same newest checkpoint
    if not guard.bad(problem, checkpointer.last):
        return None
    state = checkpointer.restore(metrics.warn, rollback=True)
    assert state is not None, "there was a checkpoint when the guard asked"
    metrics.event("resume", state.step)
    return state.step
