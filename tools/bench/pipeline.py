"""The cost of meshtrain's pipeline-parallel step compared with torch's own and with one process, in
CPU time.

    python tools/bench/pipeline.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

meshtrain's own command trains in one process and as `pp=2` under gpipe, 1f1b, interleaved-1f1b and
zbv, and torch.distributed.pipelining trains the same stages of the same plain model under its
schedules of these names (torch_pipeline.py). Two more sides show `pp=4` under 1f1b, and `pp=2` x
`dp_shard=2` x `tp=2`.
"""

import sys

from harness import Goal, Side, command
from meshtrain.pipeline.schedule import build

PP2, PP4, ALL = {"pp": 2}, {"pp": 4}, {"pp": 2, "dp_shard": 2, "tp": 2}
MICROBATCHES = 8  # per step, without other axes
ONE = "meshtrain, 1 process"


def pipeline(who: str, kind: str, schedule: str, layout: dict[str, int]) -> Side:
    """A side with its number of pipeline actions, summed over the ranks of all axes."""
    others = Side("", "", layout).ranks // layout["pp"]
    shares = layout.get("dp_shard", 1)
    made = build(schedule, ranks=layout["pp"], microbatches=MICROBATCHES // shares)
    actions = others * sum(len(made.actions_of(rank)) for rank in range(made.ranks))
    axes = " x ".join(f"{axis}={size}" for axis, size in layout.items())
    return Side(
        f"{who} {axes} {schedule}",
        kind,
        layout,
        (f"pipeline.schedule={schedule}",),
        actions=actions,
    )


BOTH = ("gpipe", "1f1b", "interleaved-1f1b", "zbv")
SIDES = (
    Side(ONE, "meshtrain"),
    *(
        pipeline(who, kind, schedule, PP2)
        for schedule in BOTH
        for who, kind in (("meshtrain", "meshtrain"), ("torch", "torch_pipeline"))
    ),
    pipeline("meshtrain", "meshtrain", "1f1b", PP4),
    pipeline("meshtrain", "meshtrain", "1f1b", ALL),
)
GOALS = (
    *(Goal(f"meshtrain pp=2 {schedule}", f"torch pp=2 {schedule}", 1.0) for schedule in BOTH),
    Goal("meshtrain pp=2 1f1b", ONE, 1.10),
    Goal("meshtrain pp=2 zbv", ONE, 1.15),
    Goal("meshtrain pp=4 1f1b", ONE, 1.15),
    Goal("meshtrain pp=2 x dp_shard=2 x tp=2 1f1b", ONE, 2.4),
    Goal("meshtrain pp=2 gpipe", ONE),
    Goal("meshtrain pp=2 interleaved-1f1b", ONE),
    *(Goal(f"torch pp=2 {schedule}", ONE) for schedule in BOTH),
)

if __name__ == "__main__":
    sys.exit(
        command(
            SIDES,
            GOALS,
            "What meshtrain's pipeline-parallel step costs beside torch's own, in CPU time.",
        )
    )
