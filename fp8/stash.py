"""What forward keeps for backward, freed at its last use.

`save_for_backward` frees when the node's backward has returned, `ctx.x = t` only when the whole graph goes. A Stash entry goes
at the moment of the last `pop`, inside backward, so staged freeing can count on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fp8.quantized import Quantized


def nbytes(value: Any) -> int:
    """Bytes of a tensor, a Quantized or a tuple of them."""
    if isinstance(value, (tuple, list)):
        return sum(nbytes(v) for v in value)
    return value.nbytes if isinstance(value, (Tensor, Quantized)) else 0


class Account:
    """Bytes that live tickets hold, by tensor class; the source of `tools.bench memory`."""

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.peak = 0

    @property
    def total(self) -> int:
        return sum(self.kept.values())

    def add(self, name: str, size: int) -> None:
        self.kept[name] = self.kept.get(name, 0) + size
        self.peak = max(self.peak, self.total)


class Ticket:
    """A claim on one value. `uses` consumers may pop it; the last pop frees it and the next one raises.

    With `rebuild`, nothing is held between forward and the first pop: that pop recomputes, later ones share the result.
    """

    def __init__(self, name: str, value: Any, rebuild: Callable[[], Any] | None, account: Account | None) -> None:
        self.name, self._rebuild, self._account = name, rebuild, account
        self._value = None if rebuild is not None else value
        self._uses, self._done = 0, False

    def _count(self, value: Any, sign: int) -> None:
        if self._account is not None and value is not None:
            self._account.add(self.name, sign * nbytes(value))

    def claim(self) -> Ticket:
        """Registers one more consumer; each consumer claims in forward and pops in backward.

        Bytes count from the first claim: a value that nobody claims goes with its last Python reference.
        """
        if self._uses == 0:
            self._count(self._value, +1)
        self._uses += 1
        return self

    def pop(self) -> Any:
        """The value; frees it for good at the last claimed use.

        Raises:
            RuntimeError: all claims are spent. A second backward through a freed graph ends here.
        """
        if self._done:
            raise RuntimeError(f"{self.name!r} was freed at its last use; backward ran twice over the same graph")
        if self._value is None:
            self._value = self._rebuild()
            self._count(self._value, +1)
        value = self._value
        self._uses -= 1
        if self._uses <= 0:
            self._drop()
        return value

    def _drop(self) -> None:
        self._count(self._value, -1)
        self._value, self._rebuild, self._done = None, None, True

    def __del__(self) -> None:
        """A graph that is dropped without a backward (evaluation) takes its bytes off the account."""
        if self._uses > 0:
            self._drop()


class Stash:
    """Makes tickets and keeps their account. One a model; `Stash()` without arguments is fine for a single layer."""

    def __init__(self, account: Account | None = None) -> None:
        self.account = account if account is not None else Account()

    def put(self, name: str, value: Any, rebuild: Callable[[], Any] | None = None) -> Ticket:
        """Keeps `value` (or, with `rebuild`, only the way to make it again) until its last pop."""
        return Ticket(name, value, rebuild, self.account)
