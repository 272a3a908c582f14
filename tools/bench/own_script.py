"""The cost of a step of a script by `meshtrain.Run`, beside plain PyTorch and meshtrain's own
command, in CPU time.

    python tools/bench/own_script.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

The script of plain_ddp.py runs as it is in one process and as DDP; script_loop.py is the same by
`Run`.
"""

import sys

from harness import Goal, Side, command

SIDES = (
    Side("plain, 1 process", "plain_ddp"),
    Side("Run, 1 process", "script_loop"),
    Side("meshtrain, 1 process", "meshtrain"),
    Side("plain DDP, 2 processes", "plain_ddp", {"dp_replicate": 2}),
    Side("Run dp_replicate=2", "script_loop", {"dp_replicate": 2}),
    Side("meshtrain dp_replicate=2", "meshtrain", {"dp_replicate": 2}),
)
GOALS = (
    Goal("Run, 1 process", "plain, 1 process", 1.03),
    Goal("Run, 1 process", "meshtrain, 1 process", 1.03),
    Goal("Run dp_replicate=2", "plain DDP, 2 processes", 1.03),
    Goal("Run dp_replicate=2", "meshtrain dp_replicate=2", 1.03),
)

if __name__ == "__main__":
    sys.exit(command(SIDES, GOALS, "What a script's step costs by meshtrain.Run, in CPU time."))
