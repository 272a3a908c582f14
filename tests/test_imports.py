"""Who may import what: what really gets imported, and that the contracts in pyproject.toml hold
what they promise."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

# Importing one of these must not bring in torch (1.8 s) or numpy: what decides is pure, and
# commands answer at once.
WITHOUT_TORCH = """
meshtrain meshtrain.layout meshtrain.job.storage meshtrain.job.environment meshtrain.data.order
meshtrain.parallel.sharding meshtrain.config meshtrain.cli.main meshtrain.cli.plan meshtrain.explain.command
meshtrain.launch.command meshtrain.checkpoint meshtrain.cli.checkpoint meshtrain.doctor.command
"""
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}
# What decides needs nothing but Python and each other, so that it can be read and tested alone.
PURE = {
    "meshtrain.errors",
    "meshtrain.layout",
    "meshtrain.data.order",
    "meshtrain.data.sequence",
    "meshtrain.huggingface.rope_keys",
    "meshtrain.job.storage",
    "meshtrain.parallel.float8_layers",
    "meshtrain.parallel.tp_plan",
    "meshtrain.pipeline.actions",
    "meshtrain.pipeline.partition",
    "meshtrain.pipeline.schedule",
}
MODELS_MAY_USE = {
    f"meshtrain.{name}"
    for name in ("attention", "dropout", "experts", "prediction", "rotary", "huggingface.keys")
}
# What transformers' classes need to run by these.
ADAPTER_MAY_USE = {"meshtrain.huggingface.conversions", "meshtrain.huggingface.experts"}
# File -> a line that breaks a contract there, and how `lint-imports` reports it.
BREAKS = {
    "mesh.py": (
        "from meshtrain.trainer import Trainer",
        "meshtrain.mesh is not allowed to import meshtrain.trainer",
    ),
    "optim/__init__.py": (
        "def late() -> None:\n    from meshtrain.run.step_logger import StepLogger",
        "meshtrain.optim is not allowed to import meshtrain.run",
    ),
    "explain/causes.py": (
        "from meshtrain.doctor.command import run",
        "meshtrain.explain is not allowed to import meshtrain.doctor",
    ),
    "data/order.py": ("import torch", "meshtrain.data.order is not allowed to import torch"),
    "explain/command.py": ("import torch", "meshtrain.explain.command -> torch"),
    "loss.py": ("import yaml", "meshtrain.loss is not allowed to import yaml"),
    "helpers/__init__.py": ("import math", "not listed as layers:\n\n- meshtrain.helpers"),
}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports anywhere in it, by their full names; those for a type checker
    alone are none."""
    tree = ast.parse(path.read_text())
    checked = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    ]
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
    """One process imports them one after the other and tells the first that brought in something
    heavy."""
    code = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}.split():\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} imports {sorted(heavy)}'\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr


def test_what_decides_needs_python_alone() -> None:
    """And what it imports in turn, as far as it lies in its own folder."""
    waiting, seen, foreign = sorted(PURE), set(), []
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for used in imports(REPO / (module.replace(".", "/") + ".py")):
            neighbour = used.rpartition(".")[0] == module.rpartition(".")[0] != "meshtrain"
            if neighbour and used not in seen:
                waiting.append(used)
            if not (used.partition(".")[0] in sys.stdlib_module_names or used in PURE or neighbour):
                foreign.append(f"{module} imports {used}")
    assert foreign == []


def test_models_are_plain_and_no_package() -> None:
    """They are loaded by path, so `import models` must not find them; of meshtrain they use small
    functions only."""
    foreign = [
        f"{path.name} imports {module}"
        for path in (REPO / "models").glob("*.py")
        for module in imports(path)
        if module.partition(".")[0] == "meshtrain"
        and module not in MODELS_MAY_USE
        and not (path.name == "transformers.py" and module in ADAPTER_MAY_USE)
    ]
    assert foreign == []
    assert not list((REPO / "models").rglob("__init__.py"))


def test_the_contracts_hold_and_catch_what_breaks_them(tmp_path: Path) -> None:
    """`lint-imports` on a copy of the package, first as it is and then with every contract
    broken."""
    package = tmp_path / "meshtrain"
    shutil.copytree(
        REPO / "meshtrain", package, ignore=shutil.ignore_patterns("__pycache__", "bundled")
    )
    shutil.copy(REPO / "pyproject.toml", tmp_path)

    def lint() -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    as_it_is = lint()
    assert as_it_is.returncode == 0, as_it_is.stdout
    (package / "helpers").mkdir()
    for name, (line, _) in BREAKS.items():
        with (package / name).open("a") as file:
            file.write(f"\n{line}\n")
    broken = lint()
    assert broken.returncode == 1
    assert f"0 kept, {len(CONTRACTS)} broken" in broken.stdout
    assert [report for _, report in BREAKS.values() if report not in broken.stdout] == []
