"""Trains one plain PyTorch model on any mesh of processes. The layout is not part of the
experiment.

For a training loop of your own: `Run` is all that surrounds a step, in five lines
(tools/examples/spread.py). Or from its parts: `start` joins the job, `build_mesh` creates the
process groups of a `Layout`, and `parallelize` distributes a model over them (see
tools/examples/own_loop.py); with `cp` a `ContextParallel` gives each rank its part of a batch. In a
loss of one's own `gather_samples` brings the samples of all data ranks. Importing this package does
not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from meshtrain.layout import Layout

if TYPE_CHECKING:
    from meshtrain.job.watchdog.watchdog import start
    from meshtrain.mesh import build_mesh
    from meshtrain.parallel.context import ContextParallel
    from meshtrain.parallel.gather_samples import gather_samples, sample_positions
    from meshtrain.parallel.parallelize import parallelize
    from meshtrain.script.run import Run

__all__ = [
    "ContextParallel",
    "Layout",
    "Run",
    "build_mesh",
    "gather_samples",
    "parallelize",
    "sample_positions",
    "start",
]

_ROOMS = {
    "ContextParallel": "meshtrain.parallel.context",
    "Run": "meshtrain.script.run",
    "build_mesh": "meshtrain.mesh",
    "gather_samples": "meshtrain.parallel.gather_samples",
    "parallelize": "meshtrain.parallel.parallelize",
    "sample_positions": "meshtrain.parallel.gather_samples",
    "start": "meshtrain.job.watchdog.watchdog",
}


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
