"""Who may import what: what really gets imported, and that the contracts in pyproject.toml hold what they promise."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# Importing one of these must not bring in torch (1.8 s) or numpy: what decides is pure, and commands answer at once.
WITHOUT_TORCH = [
    "meshtrain",
    "meshtrain.layout",
    "meshtrain.job.storage",
    "meshtrain.job.environment",
    "meshtrain.data.order",
    "meshtrain.parallel.sharding",
    "meshtrain.config",
    "meshtrain.cli.main",
    "meshtrain.cli.plan",
    "meshtrain.explain.command",
    "meshtrain.launch.command",
    "meshtrain.checkpoint",
    "meshtrain.cli.checkpoint",
    "meshtrain.doctor.command",
]
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
# These need nothing but Python and each other, so anybody may import them, from wherever they stand.
ANYWHERE = [
    module
    for source, _, module in (arrow.partition(" -> ") for arrow in CONTRACTS["downhill"]["ignore_imports"])
    if source == "meshtrain.**"
]
PURE = {"meshtrain.errors", "meshtrain.layout", "meshtrain.job.storage", *ANYWHERE}
MODELS_MAY_USE = {f"meshtrain.{name}" for name in ("attention", "dropout", "experts", "rotary", "huggingface.keys")}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it, by their full names; those for a type checker alone are none."""
    tree = ast.parse(path.read_text())
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    for_types = {inner for node in checked for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the package, they are not relative"
            module = node.module or ""
            folder = module.startswith("meshtrain") and (REPO / module.replace(".", "/")).is_dir()
            yield from (f"{module}.{alias.name}" for alias in node.names) if folder else [module]


def test_importing_what_decides_does_not_import_torch(tmp_path: Path) -> None:
    """One process imports them one after the other and tells the first that brought in something heavy."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} imports {sorted(heavy)}'\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", sorted(PURE))
def test_what_everybody_may_ask_needs_python_alone(name: str) -> None:
    """And what it asks in turn, as far as it lies in its own folder."""
    waiting, seen = [name], set()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for used in imports(REPO / (module.replace(".", "/") + ".py")):
            neighbour = used.rpartition(".")[0] == module.rpartition(".")[0] != "meshtrain"
            if neighbour and used not in seen:
                waiting.append(used)
            known = used.partition(".")[0] in sys.stdlib_module_names or used in PURE or neighbour
            assert known, f"{module} imports {used}"


@pytest.mark.parametrize("path", sorted((REPO / "models").glob("*.py")), ids=lambda path: path.name)
def test_a_model_is_plain(path: Path) -> None:
    """A model file runs without a mesh: of meshtrain it uses small functions only."""
    used = {module for module in imports(path) if module.partition(".")[0] == "meshtrain"}
    assert used <= MODELS_MAY_USE


def test_models_is_no_package() -> None:
    """Its files are loaded by path: `import models` in a user's program must never find them."""
    assert not list((REPO / "models").rglob("__init__.py"))


def upward(package: Path) -> None:
    _append(package / "mesh.py", "from meshtrain.trainer import Trainer")


def hidden(package: Path) -> None:
    _append(
        package / "optim" / "__init__.py", "def late() -> None:\n    from meshtrain.run.step_logger import StepLogger"
    )


def across(package: Path) -> None:
    _append(package / "explain" / "causes.py", "from meshtrain.doctor.command import run")


def torch_in_a_pure_file(package: Path) -> None:
    _append(package / "data" / "order.py", "import torch")


def torch_where_commands_answer(package: Path) -> None:
    _append(package / "explain" / "command.py", "import torch")


def a_folder_without_a_place(package: Path) -> None:
    (package / "helpers").mkdir()
    _append(package / "helpers" / "__init__.py", "import math")


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(f"\n{text}\n")


BREAKS = [upward, hidden, across, torch_in_a_pure_file, torch_where_commands_answer, a_folder_without_a_place]


@pytest.mark.parametrize("change", [*BREAKS, None])
def test_the_contracts_catch_what_breaks_them(change: object, tmp_path: Path) -> None:
    """`lint-imports` on a copy of the package with one thing wrong; and, without it, on the package as it is."""
    package = tmp_path / "meshtrain"
    shutil.copytree(REPO / "meshtrain", package, ignore=shutil.ignore_patterns("__pycache__", "bundled"))
    shutil.copy(REPO / "pyproject.toml", tmp_path)
    if callable(change):
        change(package)
    finished = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (finished.returncode == 0) == (change is None), finished.stdout + finished.stderr
