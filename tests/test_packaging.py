"""The wheel, away from the repository: models, configs and hardware files travel inside it, and
nothing else does."""

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from meshtrain.watch.server import PAGE

REPO = Path(__file__).resolve().parent.parent
SHORT = [
    "train.steps=2",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "optimizer.warmup_steps=0",
    "data.workers=0",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # The wheel is made of the sdist: what is missing there is missing here.
    run("-m", "build", "--no-isolation", "--outdir", str(folder), str(REPO), cwd=folder)
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel unpacked as pip does it; what it depends on is the test's own
    environment."""
    target = tmp_path_factory.mktemp("target")
    run(
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(wheel),
        cwd=target,
    )
    return target


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def test_the_wheel_is_one_package_with_every_model_config_and_hardware_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    metadata = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"meshtrain", metadata}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for pattern in (
        "models/*.py",
        "configs/*.yaml",
        "hardware/*.yaml",
        "tools/slurm/*.sbatch",
        "tools/starter/*.*",
        "docs/*.md",
        "docs/images/*.png",
        "docs/skills/*.md",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
    ):
        files = list(REPO.glob(pattern))
        assert files
        assert {f"meshtrain/bundled/{path.relative_to(REPO)}" for path in files} <= names
    assert {f"meshtrain/watch/page/{name}" for name, _ in PAGE.values()} <= names


@pytest.mark.slow
def test_the_installed_wheel_trains(installed: Path, tmp_path: Path) -> None:
    """In an empty folder, as a user's: `quickstart` and its model are those of the wheel, and so is
    a new project."""
    wheel = {"PYTHONPATH": str(installed)}
    where = run("-c", "import meshtrain; print(meshtrain.__file__)", cwd=tmp_path, **wheel)
    assert Path(where.strip()).is_relative_to(installed)
    run("-m", "meshtrain.train", "quickstart", *SHORT, "batch.global_size=4", cwd=tmp_path, **wheel)
    run("-m", "meshtrain.cli", "new", "project", cwd=tmp_path, **wheel)
    run("-m", "meshtrain.train", "train.yaml", *SHORT, cwd=tmp_path / "project", **wheel)
    for folder in ("runs/quickstart", "project/runs/first"):
        assert len((tmp_path / folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_image_gets_all_that_the_wheel_is_made_of() -> None:
    """No daemon builds it here: what can be looked at is what it copies, and that torch is one that
    meshtrain takes."""
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    lines = (REPO / "tools" / "docker" / "Dockerfile").read_text().splitlines()
    copied = {source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]}
    needed = {
        *wheel["packages"],
        *wheel["force-include"],
        project["project"]["readme"],
        "pyproject.toml",
        "LICENSE",
    }
    assert needed <= copied
    assert all((REPO / source).exists() for source in copied)
    base = next(line for line in lines if line.startswith("ARG BASE="))
    least = next(name for name in project["project"]["dependencies"] if name.startswith("torch>="))
    assert least.removeprefix("torch>=") in base


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert project["version"] in (REPO / "CHANGELOG.md").read_text()
    for template in (REPO / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= set(yaml.safe_load(template.read_text()))


@pytest.mark.slow
def test_the_installed_wheel_plans_and_launches(installed: Path, tmp_path: Path) -> None:
    """The console script is the same command, and the scripts of tools/slurm are the wheel's
    own."""
    wheel = {"PYTHONPATH": str(installed)}
    plan = ("plan", "configs/quickstart.yaml", "--hosts", "4,2")
    printed = run("-m", "meshtrain.cli", *plan, cwd=tmp_path, **wheel)
    assert "6 processes = 4 on host 0 + 2 on host 1" in printed
    console = str(installed / "bin" / "meshtrain")
    assert run(console, *plan, cwd=tmp_path, **wheel) == printed
    job = (
        "launch",
        "configs/quickstart.yaml",
        "--slurm",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--dry-run",
    )
    template = (REPO / "tools" / "slurm" / "train.sbatch").read_text()
    assert run(console, *job, cwd=tmp_path, **wheel).endswith(template.partition("\nset -euo")[2])
