"""What a rank has sent to others, by axis of the mesh and kind of collective."""

from collections import Counter


class Traffic:
    """Bytes that this rank sent, counted where they are sent.

    An all-gather or a reduce-scatter of n bytes over t ranks sends n (t - 1) / t from each, an all-reduce twice that:
    as much as any way to do it must (Chan et al., https://doi.org/10.1002/cpe.1206).
    """

    def __init__(self) -> None:
        self._sent: Counter[tuple[str, str]] = Counter()

    def add(self, axis: str, kind: str, sent: float) -> None:
        """`kind`: "all_gather", "reduce_scatter" or "all_reduce"."""
        self._sent[axis, kind] += round(sent)

    def restart(self) -> None:
        """Counts from 0 again."""
        self._sent.clear()

    def by_axis(self) -> dict[str, int]:
        """axis -> bytes sent over it so far, of every kind."""
        total: Counter[str] = Counter()
        for (axis, _), sent in self._sent.items():
            total[axis] += sent
        return dict(total)

    def by_kind(self, axis: str) -> dict[str, int]:
        """kind -> bytes sent over this axis so far."""
        return {kind: sent for (of, kind), sent in self._sent.items() if of == axis}
