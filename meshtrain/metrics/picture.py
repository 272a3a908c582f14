"""Pictures that commands draw with matplotlib (installed by the extra meshtrain[plot])."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID = "#1f2430", "#7a8194", "#e6e8ee"  # of text, of text beside it, of lines
BLUE = "#3b6fe0"


def figure_of_panels(
    title: str, panels: int, panel_height: float, share_x: bool = False
) -> "tuple[Figure, list[Axes]]":
    """A figure with panels below each other. `panel_height`: inches of each."""
    # The object interface, not pyplot, which keeps every figure in a global and needs a display.
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(9, 1 + panels * panel_height), dpi=160, facecolor="white", layout="constrained"
    )
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontweight="bold", fontsize=12)
    axes = figure.subplots(panels, 1, sharex=share_x, squeeze=False)[:, 0]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def write_picture(path: str | Path, draw: Callable[[], "Figure"], example: str) -> None:
    """Writes a figure into a file (png, svg or pdf). `example`: a name for it. Raises InputError:
    no matplotlib, or the file cannot be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "a picture needs matplotlib, which is not installed: pip install 'meshtrain[plot]'"
        )
    figure = draw()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the format
        raise InputError(
            f"cannot write a picture to {path} ({error}): give a name such as {example}"
        ) from None
