"""What a llama of transformers costs beside models/llama.py: the CPU time of a step, of one process.

    python tools/bench/adapter.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

Both sides are meshtrain's own command on the same samples; the second names the class by
`model: {name: transformers}`. Each draws its weights as its own model does, so their losses differ.
"""

import json
import sys

import yaml

from harness import WORKLOAD, Goal, Side, command

OURS, ADAPTER = "models/llama.py", "llama of transformers"

if __name__ == "__main__":
    sizes = yaml.safe_load(WORKLOAD.read_text())["model"]
    sizes.pop("name")
    model = {"name": "transformers", "model_type": "llama", "config": sizes}
    sides = (
        Side(OURS, "meshtrain"),
        Side(ADAPTER, "meshtrain", overrides=(f"model={json.dumps(model)}",)),
    )
    goals = (Goal(ADAPTER, OURS, 1.1),)
    sys.exit(command(sides, goals, "What a llama of transformers costs beside models/llama.py."))
