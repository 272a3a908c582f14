"""Distillation: a Llama that learns the probabilities of another one with the same sizes, instead
of the next tokens alone (https://arxiv.org/abs/1503.02531).

configs/distillation.yaml trains it; `train.reference` names the teacher's weights.
"""

import torch
from torch import Tensor

from meshtrain.job.locate import model_file
from meshtrain.loss import full, token_losses

llama = model_file("llama")
Config, Model, check = llama.Config, llama.Model, llama.check
init_plan, tp_plan, cp_plan = llama.init_plan, llama.tp_plan, llama.cp_plan

TEMPERATURE = 2.0
SHARE = 0.8  # of the teacher in the loss; the rest is the cross entropy


def log_probabilities(outputs: Tensor) -> Tensor:
    """(b, s, v) -> (b, s, v), softened by the temperature, in float32 or wider."""
    logits = full(outputs)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide) / TEMPERATURE, dim=-1)


def loss(outputs: Tensor, targets: Tensor, reference: Tensor) -> tuple[Tensor, dict]:
    """(b, s, v), (b, s), (b, s, v) -> (b,): of each token that has a target, the divergence from
    the teacher's probabilities, and the cross entropy. metrics.jsonl has the former as
    `divergence`."""
    has_target = targets != -100
    student = log_probabilities(outputs)
    teacher = log_probabilities(reference)
    divergence = TEMPERATURE**2 * (teacher.exp() * (teacher - student)).sum(-1) * has_target

    of_tokens = SHARE * divergence + (1 - SHARE) * token_losses(outputs, targets)
    metrics = {"divergence": (divergence.sum(1), has_target.sum(1))}
    return of_tokens.sum(1), metrics
