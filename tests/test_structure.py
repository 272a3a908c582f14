"""Documents and docstrings describe the package as it is."""

import ast
import importlib.util
import re
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "meshtrain"


def test_the_documents_list_the_rooms_as_they_are() -> None:
    """`python tools/rooms.py` writes both."""
    spec = importlib.util.spec_from_file_location("rooms", REPO / "tools" / "rooms.py")
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert (REPO / "docs" / "design.md").read_text() == rooms.design()
    assert (REPO / "docs" / "modules.md").read_text() == rooms.listing()


def test_each_module_has_a_docstring() -> None:
    files = [*PACKAGE.rglob("*.py"), *(REPO / "models").glob("*.py")]
    assert [str(path) for path in files if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_paths_in_the_documents_exist() -> None:
    """A path in backquotes is one of the repository, or of the package."""
    folders = [REPO, PACKAGE, PACKAGE / "parallel", PACKAGE / "pipeline"]
    for document in ("CONTRIBUTING.md", "docs/design.md"):
        paths = re.findall(r"`([\w./-]+(?:\.py|/))`", (REPO / document).read_text())
        missing = [
            path for path in paths if not any((folder / path).exists() for folder in folders)
        ]
        assert [path for path in missing if "NAME" not in path] == [], document
