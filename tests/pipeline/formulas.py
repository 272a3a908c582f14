"""The memory of each schedule according to the papers, for tests that check schedules and docs; and CSV files."""

from collections.abc import Callable

from meshtrain.pipeline.actions import Schedule
from meshtrain.pipeline.schedule import build

# For p ranks, m microbatches, v stages per rank and groups of g: the most stage forwards that a rank holds, each from
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
    """The most microbatches that go through one stage of a rank before any goes through its next stage: `ranks` to
    2 * `ranks` - 1, or all if there are fewer than ranks."""
    groups = max(1, microbatches // ranks)
    return -(-microbatches // groups)


def peak_bound(name: str, ranks: int, microbatches: int, stages: int | None = None) -> int:
    """The most stage forwards that any rank of a schedule may hold."""
    v = default_stages(name) if stages is None else stages
    return min(v * microbatches, PEAKS[name](ranks, microbatches, v, largest_group(microbatches, ranks)))


def csv_text(schedule: Schedule) -> str:
    """A schedule in the CSV format of torch.distributed.pipelining, "compute_only"."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)
