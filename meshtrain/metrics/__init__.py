"""What a run measures and shows. `meshtrain.metrics.read(path)` returns the rows of a
`metrics.jsonl`."""

from typing import Any


def __getattr__(name: str) -> Any:
    # not at the top: it needs rich, and programs outside a job import other modules from here
    if name == "read":
        from meshtrain.metrics.logger import read

        return read
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
