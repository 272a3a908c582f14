"""A link to the host whose copies are done as late as a GPU may do them: a copy that is not waited
for has not happened."""

import weakref
from typing import Any

import torch
from torch import Tensor

GARBAGE = 0xFF  # NaN in every floating-point type


class Late:
    """A copier for the CPU. It does a copy when it is waited for, after those that were started
    before it in the same direction, and the one that it comes after.

    Attributes:
        log: what was done, in order: ("out" | "in", number) starts a copy, ("wait", number) waits.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._pending: list[_Pending] = []

    def allocate(self, nbytes: int) -> Tensor:
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor, *, to_host: bool, after: Any) -> "_Pending":
        number = sum(kind != "wait" for kind, _ in self.log)
        copy = _Pending(number, to_host, weakref.ref(source), weakref.ref(target), after)
        host = target if to_host else source
        for earlier in self._pending:
            if earlier.host() is host:
                assert earlier.is_before(copy), "two copies of the same memory at once"
        copy.host = weakref.ref(host)
        if not to_host:
            target.fill_(GARBAGE)
        self._pending.append(copy)
        self.log.append(("out" if to_host else "in", number))
        return copy

    def wait(self, copy: "_Pending") -> None:
        self.log.append(("wait", copy.number))
        self._do(copy)

    def finish(self, copy: "_Pending") -> None:
        self._do(copy)

    def _do(self, last: "_Pending") -> None:
        for copy in [one for one in self._pending if one.is_before(last) or one is last]:
            if copy not in self._pending:
                continue
            self._pending.remove(copy)
            if copy.after is not None:
                self._do(copy.after)
            source, target = copy.source(), copy.target()
            assert source is not None, "what a copy reads was freed before it was waited for"
            assert target is not None, "what a copy writes was freed before it was waited for"
            target.copy_(source)


class _Pending:
    def __init__(
        self,
        number: int,
        to_host: bool,
        source: "weakref.ref[Tensor]",
        target: "weakref.ref[Tensor]",
        after: "_Pending | None",
    ) -> None:
        self.number, self.to_host, self.after = number, to_host, after
        self.source, self.target = source, target
        self.host: Any = None

    def is_before(self, other: "_Pending") -> bool:
        """Whether the other one is done after it, in its direction or because it says so."""
        in_turn = self.to_host == other.to_host and self.number < other.number
        return in_turn or (other.after is not None and self.is_at_or_before(other.after))

    def is_at_or_before(self, other: "_Pending") -> bool:
        return self is other or self.is_before(other)
