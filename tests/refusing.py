"""Tables of what is refused, and how that is said."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError

Row = dict[str, Any]


def check_refusals(rows: Sequence[Row], tmp_path: Path, read: Callable[[Row, Path], object]) -> None:
    """Asserts that `read`, which gets a row and a folder, raises InputError for each row, and that the message has all
    parts of its `says` (a text or several), in which DIR is the folder; of errors of a config there is one."""
    wrong = []
    for number, row in enumerate(rows):
        folder = tmp_path / str(number)
        folder.mkdir()
        message = "nothing"
        count = 1
        try:
            read(row, folder)
        except InputError as error:
            message = str(error)
            count = len(getattr(error, "errors", [error]))
        parts = [row["says"]] if isinstance(row["says"], str) else row["says"]
        if count > 1 or any(part.replace("DIR", str(folder)) not in message for part in parts):
            wrong.append(f"{row}: it says {message}")
    assert not wrong, "\n".join(wrong)
