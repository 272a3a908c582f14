"""Learning-rate schedules: the learning rate as a function of the step."""

import math
from typing import TYPE_CHECKING

from meshtrain.errors import plural

if TYPE_CHECKING:
    from meshtrain.config.schema import OptimizerSection


def learning_rate(config: "OptimizerSection", step: int, total_steps: int) -> float:
    """The learning rate of update `step` (from 1) of `total_steps`.

    Warm-up is linear and reaches `lr` at its last update. Then: "cosine" and "linear" decay towards
    `min_lr`, "wsd" (warm-up, stable, decay; Hu et al., https://arxiv.org/abs/2404.06395) stays
    constant and decays linearly in the last `decay_steps`, "constant" stays constant. `min_lr` is
    the rate of the update after the last one, so that with `min_lr: 0` no update is without effect.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps

    # The last update with the whole rate: the end of the warm-up, or the first update if there is
    # none.
    last_whole = max(config.warmup_steps, 1)
    if config.schedule == "wsd":
        last_whole = max(config.warmup_steps, total_steps - wsd_decay_steps(config, total_steps))
    progress = max(0, step - last_whole) / (total_steps + 1 - last_whole)

    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "cosine":
        share = (1 + math.cos(math.pi * progress)) / 2
    else:
        share = 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * share


def wsd_decay_steps(config: "OptimizerSection", total_steps: int) -> int:
    """How many updates decay at the end with "wsd": `decay_steps`, or a tenth of the run."""
    if config.decay_steps is not None:
        return config.decay_steps
    return max(1, total_steps // 10)


def warmup_note(config: "OptimizerSection", total_steps: int) -> str | None:
    """What to say of a run that ends before its warm-up does; None: it does not."""
    if config.warmup_steps <= total_steps:
        return None
    highest = learning_rate(config, total_steps, total_steps)
    return (
        f"the run ends in its warm-up: optimizer.warmup_steps is {config.warmup_steps}, and the "
        f"run has {plural(total_steps, 'step')}, so that its learning rate reaches {highest:g} "
        f"instead of {config.lr:g}"
    )
