"""What a layout will cost before it runs: memory and time of a step, and the layout that is
best."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshtrain.foresight.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]


def __getattr__(name: str) -> Any:
    """On demand: a run that imports a part of this room needs no tracing."""
    if name in __all__:
        from meshtrain.foresight import prediction

        return getattr(prediction, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
