"""What is said when the buffers of the experts do not fit: with dropless experts their size is the router's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class ExpertMemoryError(RuntimeError):
    """The rows that came to this rank's experts do not fit into the device's memory; the message says what they need."""


@contextmanager
def explained(where: str, rows: Callable[[], int], row_bytes: int) -> Iterator[None]:
    """Turns running out of memory inside into an ExpertMemoryError with the rows and the GiB that they need.

    Args:
        where: layer, rank and experts, as the message begins.
        rows: gives the rows of the padded buffer; called after the failure only.
        row_bytes: what one row takes in all buffers of forward.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        needed = rows()
        raise ExpertMemoryError(
            f"{where}: out of memory: {needed} rows need {needed * row_bytes / 2**30:.2f} GiB in forward. Smaller micro-batches, "
            "more ep ranks, more recomputation or a better balance of the experts would help"
        ) from error
