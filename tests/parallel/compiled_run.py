"""Trains what the command line names, and prints how many graphs the compiler found in its cache, and how many not."""

import json
import sys

from meshtrain.train import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    from torch._dynamo.utils import counters  # only now: it chooses a place for the cache

    kinds = (("aot_autograd", "autograd_cache_"), ("inductor", "fxgraph_cache_"))
    print(json.dumps({what: sum(counters[of][name + what] for of, name in kinds) for what in ("hit", "miss")}))
    sys.exit(status)
