"""`meshtrain plan --schedule`: draws the learning rate, the batch size and the mixture over the
steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshtrain.config import Config
from meshtrain.data.order import changes_of, value_at
from meshtrain.errors import InputError
from meshtrain.metrics.picture import BLUE, figure_of_panels
from meshtrain.optim.lr_schedule import learning_rate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 64  # characters of a line in a terminal
LEVELS = "▁▂▃▄▅▆▇█"
MOST_STEPS = 1000  # in JSON


@dataclass(frozen=True)
class Course:
    """Values over the steps of a run, from step 1 on."""

    name: str
    values: tuple[float, ...]

    def line(self) -> str:
        """One row of block characters, each as high as the largest value of the steps that it
        stands for."""
        steps = len(self.values)
        width = min(WIDTH, steps)
        most = max(self.values)
        characters = ""
        for i in range(width):
            cell = self.values[i * steps // width : (i + 1) * steps // width]
            level = max(cell) / (most or 1.0)
            characters += LEVELS[round(level * (len(LEVELS) - 1))]
        first, last = self.values[0], self.values[-1]
        return f"{self.name:<14} {characters}  {first:.4g} -> {last:.4g}, at most {most:.4g}"


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

    # Name -> (step, the value from there on).
    changes: dict[str, Sequence[tuple[int, float]]] = {"batch size": config.batch.sizes.changes}
    if config.data.seq_len_warmup:
        changes["sequence"] = config.data.seq_len_warmup
    weights = _weights(config)
    for i, source in enumerate(config.data.sources):
        changes[f"share of {source.name}"] = [
            (step, weight[i] / sum(weight)) for step, weight in weights
        ]
    courses = [Course("learning rate", rates)]
    for name, of_name in changes.items():
        values = tuple(value_at(of_name, step) for step in range(steps))
        courses.append(Course(name, values))
    return courses


def _weights(config: Config) -> Any:
    """(step, the weights of all sources from there on)"""
    return changes_of([source.weight for source in config.data.sources])


def _changing_steps(config: Config, steps: int) -> list[int]:
    """Steps, from 0, from which on something but the learning rate is another."""
    changes = (*config.batch.sizes.changes, *_weights(config), *config.data.seq_len_warmup)
    return sorted({step for step, _ in changes if 0 < step < steps})


def schedule_text(config: Config, courses: Sequence[Course]) -> str:
    rates, *others = courses
    sizes, steps = config.batch.sizes, len(rates.values)
    lines = [f"schedule of {config.name}: {steps:,} steps, {sizes.before(steps):,} samples"]
    lines += [course.line() for course in courses]
    for step in _changing_steps(config, steps):
        values = ", ".join(f"{course.name} {course.values[step]:.4g}" for course in others)
        lines.append(
            f"from step {step + 1:,} on, after {sizes.before(step):,} samples: {values}, lr "
            f"{rates.values[step]:.4g}"
        )
    return "\n".join(lines)


def schedule_json(config: Config, courses: Sequence[Course]) -> dict[str, Any]:
    """All courses, with the values of about 1,000 steps at most, including the first and the
    last."""
    steps = len(courses[0].values)
    stride = -(-steps // MOST_STEPS)
    shown = sorted({*range(0, steps, stride), *_changing_steps(config, steps), steps - 1})
    return {
        "config": config.name,
        "steps": [step + 1 for step in shown],
        "samples": [config.batch.sizes.before(step + 1) for step in shown],
        "courses": {course.name: [course.values[step] for step in shown] for course in courses},
    }


def picture(config: Config, courses: Sequence[Course]) -> "Figure":
    """A panel per course."""
    figure, panels = figure_of_panels(
        f"schedule of {config.name}", panels=len(courses), panel_height=1.6, share_x=True
    )
    for panel, course in zip(panels, courses, strict=True):
        panel.step(range(1, len(course.values) + 1), course.values, where="mid", color=BLUE)
        panel.set_title(course.name, loc="left", fontsize=10)
        panel.set_ylim(0, 1.05 * max(course.values) or 1)
    panels[-1].set_xlabel("step")
    return figure
