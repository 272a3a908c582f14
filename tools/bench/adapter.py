"""What a step of a llama of transformers costs beside models/llama.py, in CPU time of one process.

    python tools/bench/adapter.py [--pairs 20] [--steps 2] [--json] [key.path=value ...]

Both sides are meshtrain's own command on the same samples; the second one has the class of
transformers, by `model: {name: transformers}`. Each draws its weights as its own model does, so
their losses are near each other, not equal.
"""

import json
import sys

import yaml

from harness import WORKLOAD, Goal, Side, command

_SIZES = yaml.safe_load(WORKLOAD.read_text())["model"]
del _SIZES["name"]
_MODEL = {"name": "transformers", "model_type": "llama", "config": _SIZES}
SIDES = (
    Side("models/llama.py", "meshtrain"),
    Side("llama of transformers", "meshtrain", overrides=(f"model={json.dumps(_MODEL)}",)),
)
GOALS = (Goal("llama of transformers", "models/llama.py", 1.1),)

if __name__ == "__main__":
    sys.exit(command(SIDES, GOALS, "What a llama of transformers costs beside models/llama.py."))
