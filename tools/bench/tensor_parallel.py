"""The cost of meshtrain's tensor-parallel step compared with torch's own and with one process, in
CPU time.

    python tools/bench/tensor_parallel.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

Eight sides train the same model on the same samples: meshtrain's own command in one process and as
`tp=2`, `tp=4` and `dp_shard=2` x `tp=2`, and the same three layouts with torch's
`parallelize_module` and `fully_shard` around the same plain model (torch_parallel.py). FSDP keeps
its parameters for a whole step on both sides. Between the parallel regions, meshtrain's activations
are shards of the sequence; torch's are whole, since that is faster for it over gloo, and for `tp=2`
there is also a side with shards.
"""

import sys

from harness import Goal, Side, command

TP2, TP4, BOTH = {"tp": 2}, {"tp": 4}, {"dp_shard": 2, "tp": 2}
KEEP = ("parallel.reshard_after_forward=false",)
WHOLE = ("parallel.sequence_parallel=false",)
SIDES = (
    Side("meshtrain, 1 process", "meshtrain"),
    Side("meshtrain tp=2", "meshtrain", TP2),
    Side("torch tp=2", "torch_parallel", TP2, WHOLE),
    Side("torch tp=2, sequence sharded", "torch_parallel", TP2),
    Side("meshtrain tp=4", "meshtrain", TP4),
    Side("torch tp=4", "torch_parallel", TP4, WHOLE),
    Side("meshtrain dp_shard=2 x tp=2", "meshtrain", BOTH, KEEP),
    Side("torch dp_shard=2 x tp=2", "torch_parallel", BOTH, WHOLE),
)
GOALS = (
    Goal("meshtrain tp=2", "meshtrain, 1 process", 1.65),
    Goal("meshtrain tp=4", "meshtrain, 1 process", 2.5),
    Goal("meshtrain dp_shard=2 x tp=2", "meshtrain, 1 process", 2.0),
    Goal("meshtrain tp=2", "torch tp=2", 1.0),
    Goal("meshtrain tp=4", "torch tp=4", 1.0),
    Goal("meshtrain dp_shard=2 x tp=2", "torch dp_shard=2 x tp=2", 1.0),
    Goal("torch tp=2", "meshtrain, 1 process"),
    Goal("torch tp=2, sequence sharded", "meshtrain, 1 process"),
    Goal("torch tp=4", "meshtrain, 1 process"),
    Goal("torch dp_shard=2 x tp=2", "meshtrain, 1 process"),
)

if __name__ == "__main__":
    sys.exit(
        command(
            SIDES,
            GOALS,
            "What meshtrain's tensor-parallel step costs beside torch's own, in CPU time.",
        )
    )
