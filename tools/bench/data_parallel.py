"""The cost of meshtrain's step compared with plain PyTorch, in CPU time: one process, DDP and FSDP
on two processes.

    python tools/bench/data_parallel.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

Six sides train the same model on the same samples: plain_ddp.py in one process and as DDP, and
meshtrain's own command in one process, as `dp_replicate=2`, and as `dp_shard=2` that keeps and that
reshards its parameters.
"""

import sys

from harness import Goal, Side, command

KEEP = ("parallel.reshard_after_forward=false",)
SIDES = (
    Side("plain, 1 process", "plain_ddp"),
    Side("meshtrain, 1 process", "meshtrain"),
    Side("plain DDP, 2 processes", "plain_ddp", {"dp_replicate": 2}),
    Side("meshtrain dp_replicate=2", "meshtrain", {"dp_replicate": 2}),
    Side("meshtrain dp_shard=2", "meshtrain", {"dp_shard": 2}, KEEP),
    Side("the same, resharding", "meshtrain", {"dp_shard": 2}),
)
GOALS = (
    Goal("meshtrain, 1 process", "plain, 1 process", 1.03),
    Goal("meshtrain dp_replicate=2", "plain DDP, 2 processes", 1.03),
    Goal("meshtrain dp_replicate=2", "plain, 1 process", 1.15),
    Goal("meshtrain dp_shard=2", "plain, 1 process", 1.15),
    Goal("the same, resharding", "plain, 1 process"),
    Goal("plain DDP, 2 processes", "plain, 1 process"),
)

if __name__ == "__main__":
    sys.exit(
        command(SIDES, GOALS, "What meshtrain's step costs beside plain PyTorch, in CPU time.")
    )
