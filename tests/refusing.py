"""Tables of what is refused, and how that is said: rows of YAML."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshtrain.errors import InputError

Row = dict[str, Any]


def check_refusals(
    rows: Sequence[Row], tmp_path: Path, read: Callable[[Row, Path], object]
) -> None:
    """Asserts that `read`, which gets a row and a folder, raises InputError for each row, whose
    message has all parts of `says` (a text or several), in which DIR is the folder. A config has
    one error, or as many as `errors`."""
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
        if count != row.get("errors", 1) or any(
            part.replace("DIR", str(folder)) not in message for part in parts
        ):
            wrong.append(f"{row}: it says {message}")
    assert not wrong, "\n".join(wrong)


def damage(folder: Path, row: Row) -> None:
    """Changes files as a row says: `rename`; `write` puts other bytes (latin-1) in their place, or
    [bytes, how often]; `patch` puts other bytes at an offset; `cut` takes bytes off the end; `json`
    sets keys; `remove` deletes."""
    for old, new in row.get("rename", {}).items():
        (folder / old).rename(folder / new)
    for name, content in row.get("write", {}).items():
        text, count = content if isinstance(content, list) else (content, 1)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode("latin-1") * count)
    for name, patches in row.get("patch", {}).items():
        raw = bytearray((folder / name).read_bytes())
        for offset, content in patches.items():
            raw[offset : offset + len(content)] = content.encode("latin-1")
        (folder / name).write_bytes(raw)
    for name, count in row.get("cut", {}).items():
        (folder / name).write_bytes((folder / name).read_bytes()[:-count])
    for name, keys in row.get("json", {}).items():
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | keys))
    for name in row.get("remove", ()):
        (folder / name).unlink()
