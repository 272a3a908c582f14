"""Trains what the command line names, and prints how many graphs the compiler found in its cache, and how many not."""

import json
import sys

from torch._dynamo.utils import counters

from meshtrain.train import main

if __name__ == "__main__":
    status = main(sys.argv[1:])
    found = {
        what: counters["aot_autograd"][f"autograd_cache_{what}"] + counters["inductor"][f"fxgraph_cache_{what}"]
        for what in ("hit", "miss")
    }
    print(json.dumps(found))
    sys.exit(status)
