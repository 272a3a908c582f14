"""The cost of a Muon step compared with an AdamW step, in CPU time: one process, two replicas, and
two FSDP shards.

python tools/bench/optimizers.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]
"""

import sys

from harness import Goal, Side, command

MUON = ("optimizer.name=muon",)
SIDES = (
    Side("AdamW, 1 process", "meshtrain"),
    Side("Muon, 1 process", "meshtrain", overrides=MUON),
    Side("AdamW dp_replicate=2", "meshtrain", {"dp_replicate": 2}),
    Side("Muon dp_replicate=2", "meshtrain", {"dp_replicate": 2}, MUON),
    Side("AdamW dp_shard=2", "meshtrain", {"dp_shard": 2}),
    Side("Muon dp_shard=2", "meshtrain", {"dp_shard": 2}, MUON),
)
GOALS = (
    Goal("Muon, 1 process", "AdamW, 1 process"),
    Goal("Muon dp_replicate=2", "AdamW dp_replicate=2"),
    Goal("Muon dp_shard=2", "AdamW dp_shard=2"),
)

if __name__ == "__main__":
    sys.exit(
        command(SIDES, GOALS, "What a step with Muon costs beside one with AdamW, in CPU time.")
    )
