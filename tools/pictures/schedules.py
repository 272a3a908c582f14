"""Draws docs/images/schedules.png: every pipeline schedule on 4 ranks with 8 microbatches, on a
common time scale.

    python tools/pictures/schedules.py docs/images/schedules.png

A stage's forward, input gradient and weight gradients take one unit of time each. Stages of
schedules with one stage per rank take two units, since they are twice as large.
"""

import io
import sys

from PIL import Image

from meshtrain.cli.pipeline_picture import picture
from meshtrain.pipeline.schedule import NAMES, build
from meshtrain.pipeline.simulate import simulate
from meshtrain.pipeline.timeline_io import Record

RANKS, MICROBATCHES = 4, 8


def record(name: str) -> Record:
    """The simulated timeline of a schedule."""
    schedule = build(name, ranks=RANKS, microbatches=MICROBATCHES)
    each = schedule.stages_per_rank
    return Record(
        f"{name}: {each} stage{'s' * (each > 1)} per rank", simulate(schedule, *[2 / each] * 3)
    )


def draw(output: str) -> None:
    with io.BytesIO() as pixels:
        picture([record(name) for name in NAMES]).savefig(pixels)
        # less than half the bytes
        Image.open(pixels).convert("RGB").quantize(128).save(output, optimize=True)


if __name__ == "__main__":
    draw(sys.argv[1])
