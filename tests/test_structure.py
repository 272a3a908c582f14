"""The shape of the package: a root that shows what a user starts or imports, folders and functions of a readable size,
and a table of the folders in docs/design.md that says what their files say of themselves."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parent.parent
PACKAGE = REPO / "meshtrain"
FILES = sorted([*PACKAGE.rglob("*.py"), *(REPO / "models").glob("*.py")])
FOLDERS = sorted({path.parent for path in FILES if PACKAGE in path.parents and path.parent != PACKAGE})
MOST_IN_ROOT, MOST_IN_FOLDER = 14, 20  # modules
TO_COME = ("parallel/expert.py",)  # examples of what somebody may write
MOST_OF_FUNCTION, MOST_OF_TRAIN, MOST_OF_DOCTOR = 60, 300, 3000  # lines

VAGUE = "asked each found given gone heard held how kept left meant one said seen some told wanted what when where why"
PUBLIC = {  # vague names that stay: keys of what `--json` prints
    "meshtrain/checkpoint/diff.py": {"what"},
    "meshtrain/checkpoint/verify.py": {"what"},
    "meshtrain/doctor/findings.py": {"what", "where"},
    "meshtrain/doctor/records.py": {"how", "seen", "what"},
}
SIDES = ("images.py", "order.py", "tokenizer.py")  # of data/, where `left` is the other side of right


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_the_root_holds_few_modules() -> None:
    modules = [path.name for path in PACKAGE.glob("*.py")]
    assert len(modules) <= MOST_IN_ROOT, modules


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_folder_holds_few_files(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MOST_IN_FOLDER


def test_the_run_is_on_one_page() -> None:
    assert lines(PACKAGE / "train.py") <= MOST_OF_TRAIN


def test_the_doctor_is_no_second_product() -> None:
    assert sum(map(lines, (PACKAGE / "doctor").glob("*.py"))) <= MOST_OF_DOCTOR


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_functions_fit_a_screen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_OF_FUNCTION, f"{path}:{node.lineno}: {node.name} has {length} lines"


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Of variables, attributes, parameters, functions and classes, without leading underscores."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=str(name))
            ):
                yield name.lstrip("_")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_names_are_nouns_of_the_subject(path: Path) -> None:
    """What is allowed is exactly what is there, so that both lists shrink with the code."""
    allowed = PUBLIC.get(str(path.relative_to(REPO)), set())
    if path.parent == PACKAGE / "data" and path.name in SIDES:
        allowed = allowed | {"left"}
    assert set(VAGUE.split()).intersection(defined_names(ast.parse(path.read_text()))) == allowed


def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", REPO / "tools" / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documents_list_the_rooms_as_they_are() -> None:
    """`python tools/rooms.py` writes both."""
    tool = rooms()
    assert (REPO / "docs" / "design.md").read_text() == tool.design()
    assert (REPO / "docs" / "modules.md").read_text() == tool.listing()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_a_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/design.md"])
def test_paths_in_the_documents_exist(name: str) -> None:
    """A path in backquotes is one of the repository, or of the package."""
    for path in re.findall(r"`([\w./-]+(?:\.py|/))`", (REPO / name).read_text()):
        folders = [REPO, PACKAGE, *(PACKAGE / folder for folder in ("parallel", "pipeline"))]
        assert "NAME" in path or path in TO_COME or any((folder / path).exists() for folder in folders), (
            f"{name} names {path}"
        )
