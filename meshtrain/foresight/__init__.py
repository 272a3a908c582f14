"""What a layout will cost before it runs: memory and time of a step, and the layout that is best."""

from meshtrain.foresight.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
