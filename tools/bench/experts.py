"""The cost of a step of meshtrain's experts compared with a loop over experts in plain PyTorch, in
CPU time.

    python tools/bench/experts.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

All sides train the same small Qwen3-MoE (experts.yaml) on the same samples: a hand-written loop
(plain_experts.py), and meshtrain's own command in one process and with experts distributed over
two, `expert_parallel=2`, where FSDP keeps its gathered parameters for a whole step.
"""

import sys

from harness import HERE, Goal, Side, command

WORKLOAD = HERE / "experts.yaml"
PLAIN, ONE, TWO = "plain, 1 process", "meshtrain, 1 process", "meshtrain expert_parallel=2"
DEALT = ("parallel.expert_parallel=2", "parallel.reshard_after_forward=false")
SIDES = (
    Side(PLAIN, "plain_experts"),
    Side(ONE, "meshtrain"),
    Side(TWO, "meshtrain", {"dp_shard": 2}, DEALT),
)
GOALS = (Goal(ONE, PLAIN, 1.05), Goal(TWO, ONE, 1.6))

if __name__ == "__main__":
    sys.exit(
        command(SIDES, GOALS, "What a step of meshtrain's experts costs, in CPU time.", WORKLOAD)
    )
