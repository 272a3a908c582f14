"""Learning-rate schedules: the learning rate as a function of the step."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshtrain.config import Optimizer as OptimizerConfig


def learning_rate(config: "OptimizerConfig", step: int, total_steps: int) -> float:
    """The learning rate of update `step` (from 1) of `total_steps`.

    Warm-up is linear and reaches `lr` at its last update. Then: "cosine" and "linear" decay to `min_lr` at the last
    step, "wsd" (warm-up, stable, decay; Hu et al., https://arxiv.org/abs/2404.06395) stays constant and decays linearly
    over the last `decay_steps`, "constant" stays constant.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        decay = config.decay_steps if config.decay_steps is not None else max(1, total_steps // 10)
        start = max(start, total_steps - decay)
    progress = min(1.0, max(0.0, (step - start) / max(1, total_steps - start)))
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    else:
        share = 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * share
