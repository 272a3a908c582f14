"""What the papers say of the memory of each schedule, for the tests that hold schedules and docs to it; CSV files."""

from collections.abc import Callable

from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import build

# Of p ranks, m microbatches, v stages per rank and groups of g: the stage forwards that a rank holds at most, each from
# its forward until its weight gradient is done.
PEAKS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, m, v, g: m,
    "1f1b": lambda p, m, v, g: p,
    "interleaved-1f1b": lambda p, m, v, g: (v - 1) * g + 2 * p - 1,
    "looped-bfs": lambda p, m, v, g: v * m,
    "zb-h1": lambda p, m, v, g: p,
    "zb-h2": lambda p, m, v, g: 2 * p - 1,
    "interleaved-zb": lambda p, m, v, g: (v - 1) * g + p,
    "zbv": lambda p, m, v, g: 2 * p,
    "v-half": lambda p, m, v, g: p + 2,
    "v-min": lambda p, m, v, g: 2 * -(-(p - 1) // 3) + 2,
    "dualpipev": lambda p, m, v, g: 2 * p + 1,
}


def default_stages(name: str) -> int:
    return build(name, ranks=1, microbatches=1).stages_per_rank


def largest_group(microbatches: int, ranks: int) -> int:
    """The most microbatches that go through one stage of a rank before any goes through its next one: `ranks` to
    2 * `ranks` - 1, or all where there are fewer than ranks."""
    groups = max(1, microbatches // ranks)
    return -(-microbatches // groups)


def peak_bound(name: str, ranks: int, microbatches: int, stages: int | None = None) -> int:
    """The stage forwards that any rank of a schedule holds at most."""
    v = default_stages(name) if stages is None else stages
    return min(v * microbatches, PEAKS[name](ranks, microbatches, v, largest_group(microbatches, ranks)))


def csv_text(schedule: Schedule) -> str:
    """A schedule as torch.distributed.pipelining writes it, "compute_only"."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)
