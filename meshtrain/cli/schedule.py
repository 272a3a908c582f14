"""`meshtrain plan --schedule`: draws the learning rate, the batch size and the mixture over the
steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtrain.config import Config
from meshtrain.data.order import BatchSizes, changes_of, value_at
from meshtrain.errors import InputError
from meshtrain.optim.lr_schedule import learning_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 64  # characters of a line in a terminal
LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Course:
    """Values over the steps of a run, from step 1 on."""

    name: str
    values: tuple[float, ...]

    def line(self) -> str:
        """One row of block characters, each as high as the largest value of the steps that it
        stands for."""
        n, top = len(self.values), max(self.values) or 1.0
        width = min(WIDTH, n)
        cells = [self.values[i * n // width : (i + 1) * n // width] for i in range(width)]
        drawn = "".join(LEVELS[round(max(cell) / top * (len(LEVELS) - 1))] for cell in cells)
        return (
            f"{self.name:<14} {drawn}  {self.values[0]:.4g} -> {self.values[-1]:.4g}, at most "
            f"{max(self.values):.4g}"
        )


def courses_of(config: Config) -> list[Course]:
    """The values that change over the steps of a run. Raises InputError: the number of steps
    depends on the data."""
    steps = config.train.steps
    if steps is None:
        raise InputError(
            "--schedule needs the number of steps, which train.epochs does not say: give "
            "train.steps=N"
        )
    rates = tuple(learning_rate(config.optimizer, step, steps) for step in range(1, steps + 1))
    changes: dict[str, Sequence[tuple[int, float]]] = {"batch size": config.batch.sizes.changes}
    if config.data.seq_len_warmup:
        changes["sequence"] = config.data.seq_len_warmup
    weights = changes_of([source.weight for source in config.data.sources])
    for i, source in enumerate(config.data.sources):
        changes[f"share of {source.name}"] = [
            (step, weight[i] / sum(weight)) for step, weight in weights
        ]
    by_step = [
        Course(name, tuple(value_at(own, step) for step in range(steps)))
        for name, own in changes.items()
    ]
    return [Course("learning rate", rates), *by_step]


def schedule_text(config: Config, courses: Sequence[Course]) -> str:
    rates, sizes, steps = courses[0].values, config.batch.sizes, len(courses[0].values)
    lines = [f"schedule of {config.name}: {steps:,} steps, {sizes.before(steps):,} samples"]
    lines += [course.line() for course in courses]
    for step in _changing_steps(config, sizes, steps):
        at = ", ".join(f"{course.name} {course.values[step]:.4g}" for course in courses[1:])
        lines.append(
            f"from step {step + 1:,} on, after {sizes.before(step):,} samples: {at}, lr "
            f"{rates[step]:.4g}"
        )
    return "\n".join(lines)


def _changing_steps(config: Config, sizes: BatchSizes, steps: int) -> list[int]:
    weights = changes_of([source.weight for source in config.data.sources])
    changes = {step for step, _ in (*sizes.changes, *weights, *config.data.seq_len_warmup)}
    return [step for step in sorted(changes) if 0 < step < steps]


def schedule_json(config: Config, courses: Sequence[Course]) -> dict[str, Any]:
    """All courses, with the values of about 1,000 steps at most, including the first and the
    last."""
    steps = len(courses[0].values)
    every = range(0, steps, -(-steps // 1000))
    shown = sorted({*every, *_changing_steps(config, config.batch.sizes, steps), steps - 1})
    return {
        "config": config.name,
        "steps": [step + 1 for step in shown],
        "samples": [config.batch.sizes.before(step + 1) for step in shown],
        "courses": {course.name: [course.values[step] for step in shown] for course in courses},
    }


def picture(config: Config, courses: Sequence[Course]) -> "Figure":
    """A panel per course."""
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure and needs a display

    figure = Figure(
        figsize=(9, 0.6 + 1.6 * len(courses)), dpi=160, facecolor="white", layout="constrained"
    )
    figure.suptitle(f"schedule of {config.name}", x=0.01, ha="left", fontweight="bold", fontsize=12)
    panels = figure.subplots(len(courses), 1, sharex=True, squeeze=False)[:, 0]
    for panel, course in zip(panels, courses, strict=True):
        panel.step(range(1, len(course.values) + 1), course.values, where="mid", color="#2f5fb3")
        panel.set_title(course.name, loc="left", fontsize=10)
        panel.set_ylim(0, 1.05 * max(course.values) or 1)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    return figure
