"""Who may import what: what really gets imported, and that the contracts in pyproject.toml hold what they promise."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Importing one of these must not bring in torch (1.8 s) or numpy: what decides is pure, and commands answer at once.
WITHOUT_TORCH = [
    "meshtrain",
    "meshtrain.layout",
    "meshtrain.errors",
    "meshtrain.environment",
    "meshtrain.batch",
    "meshtrain.cuts",
    "meshtrain.data.order",
    "meshtrain.config",
    "meshtrain.cli",
    "meshtrain.plan",
    "meshtrain.checkpoint",
    "meshtrain.checkpoint.command",
    "meshtrain.operate.doctor.command",
]
# These import nothing but Python's standard library, and each of the project's that is named with them.
PURE = {
    "layout.py": set(),
    "errors.py": set(),
    "environment.py": {"errors"},
    "batch.py": {"data"},
    "cuts.py": set(),
    "data/order.py": set(),
    "checkpoint/placement.py": {"cuts", "layout"},
    "checkpoint/retention.py": set(),
    "checkpoint/crc.py": set(),
}
MODELS_MAY_USE = {"meshtrain.attention", "meshtrain.dropout"}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it, by their full names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the package, they are not relative"
            own = node.module == "meshtrain"
            yield from (f"meshtrain.{alias.name}" for alias in node.names) if own else [node.module or ""]


def test_importing_what_decides_does_not_import_torch(tmp_path: Path) -> None:
    """One process imports them one after the other and tells the first that brought in something heavy."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} imports {sorted(heavy)}'\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("name", PURE)
def test_a_pure_room_needs_python_alone(name: str) -> None:
    for module in imports(REPO / "meshtrain" / name):
        top, _, rest = module.partition(".")
        allowed = rest.partition(".")[0] in PURE[name] if top == "meshtrain" else top in sys.stdlib_module_names
        assert allowed, f"meshtrain/{name} imports {module}"


@pytest.mark.parametrize("path", sorted((REPO / "models").glob("*.py")), ids=lambda path: path.name)
def test_a_model_is_plain(path: Path) -> None:
    """A model file runs without a mesh: of meshtrain it uses small functions only."""
    used = {module for module in imports(path) if module.partition(".")[0] == "meshtrain"}
    assert used <= MODELS_MAY_USE


def test_models_is_no_package() -> None:
    """Its files are loaded by path: `import models` in a user's program must never find them."""
    assert not list((REPO / "models").rglob("__init__.py"))


def upward(package: Path) -> None:
    _append(package / "mesh.py", "from meshtrain.step import Trainer")


def hidden(package: Path) -> None:
    _append(package / "optim.py", "def late() -> None:\n    from meshtrain.report import Report")


def torch_in_a_pure_room(package: Path) -> None:
    _append(package / "data" / "order.py", "import torch")


def a_room_without_a_place(package: Path) -> None:
    _append(package / "parallel" / "helpers.py", "import math")


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(f"\n{text}\n")


@pytest.mark.parametrize("change", [upward, hidden, torch_in_a_pure_room, a_room_without_a_place, None])
def test_the_contracts_catch_what_breaks_them(change: object, tmp_path: Path) -> None:
    """`lint-imports` on a copy of the package with one thing wrong; and, without it, on the package as it is."""
    package = tmp_path / "meshtrain"
    shutil.copytree(REPO / "meshtrain", package, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    if callable(change):
        change(package)
    found = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (found.returncode == 0) == (change is None), found.stdout + found.stderr
