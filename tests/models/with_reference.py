"""The distillation of tools/examples/losses without its metric."""

from pathlib import Path

from torch import Tensor

from meshtrain.job.locate import python_file

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples" / "losses"
example = python_file(EXAMPLES / "distillation.py")
Config, Model, check = example.Config, example.Model, example.check
init_plan, tp_plan, cp_plan = example.init_plan, example.tp_plan, example.cp_plan


def loss(outputs: Tensor, targets: Tensor, reference: Tensor) -> Tensor:
    of_samples, _ = example.loss(outputs, targets, reference)
    return of_samples
