"""Files of the pictures that commands draw."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from meshtrain.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    # a ValueError: a file format that matplotlib does not know
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot write a picture to {path} ({error}): give a name such as {example}"
        ) from None
