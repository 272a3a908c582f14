"""A Qwen3 with experts and a loss of its own: every third word of the vocabulary counts more."""

from torch import Tensor

from meshtrain.job.locate import model_file
from meshtrain.loss import token_losses

moe = model_file("qwen3_moe")
Config, Model, check = moe.Config, moe.Model, moe.check
init_plan, tp_plan, cp_plan, ep_plan = moe.init_plan, moe.tp_plan, moe.cp_plan, moe.ep_plan


def _weights(targets: Tensor) -> Tensor:
    return (targets != -100) * (0.25 + (targets % 3 == 0))


def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    losses = token_losses(outputs, targets, label_smoothing=0.1)
    is_third = (targets != -100) & (targets % 3 == 0)
    metrics = {"third/loss": ((losses * is_third).sum(1), is_third.sum(1))}
    return (losses * _weights(targets)).sum(1), metrics


def weight(targets: Tensor) -> Tensor:
    return _weights(targets).sum(1)
