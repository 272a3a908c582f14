"""The cost of meshtrain's context-parallel step compared with one process and tensor parallelism,
in CPU time.

    python tools/bench/context_parallel.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

All sides are meshtrain's own command, which trains the same model on the same sequences of 1,024
tokens: in one process, as `cp=2` with each method, and as `tp=2`. FSDP, which shards parameters
over `cp`, keeps them for a step.
"""

import sys

from harness import Goal, Side, command

LONG = ("data.seq_len=1024", "batch.global_size=4", "batch.micro_size=1")
KEEP = (*LONG, "parallel.reshard_after_forward=false")
CP2, TP2 = {"cp": 2}, {"tp": 2}
SIDES = (
    Side("meshtrain, 1 process", "meshtrain", overrides=LONG),
    Side("meshtrain cp=2 gather", "meshtrain", CP2, KEEP),
    Side("meshtrain cp=2 ring", "meshtrain", CP2, (*KEEP, "parallel.context=ring")),
    Side("meshtrain cp=2 heads", "meshtrain", CP2, (*KEEP, "parallel.context_heads=2")),
    Side("meshtrain tp=2", "meshtrain", TP2, LONG),
)
GOALS = (
    Goal("meshtrain cp=2 gather", "meshtrain, 1 process", 1.5),
    Goal("meshtrain cp=2 ring", "meshtrain, 1 process", 1.5),
    Goal("meshtrain cp=2 heads", "meshtrain, 1 process", 1.5),
    Goal("meshtrain cp=2 gather", "meshtrain tp=2"),
    Goal("meshtrain cp=2 ring", "meshtrain tp=2"),
    Goal("meshtrain cp=2 heads", "meshtrain tp=2"),
    Goal("meshtrain tp=2", "meshtrain, 1 process"),
)

if __name__ == "__main__":
    sys.exit(
        command(
            SIDES,
            GOALS,
            "What meshtrain's context-parallel step costs beside one process, in CPU time.",
        )
    )
