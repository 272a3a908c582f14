"""The wheel, away from the repository: models, configs and hardware files travel inside it, and nothing else does."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SHORT = [
    "train.steps=2",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "optimizer.warmup_steps=0",
    "batch.global_size=4",
    "data.workers=0",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPO), cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel unpacked as pip does it; what it depends on is the test's own environment."""
    target = tmp_path_factory.mktemp("target")
    run("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


def run(*arguments: str, cwd: Path, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_wheel_puts_one_package_into_site_packages(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "meshtrain",
        f"{'-'.join(wheel.name.split('-')[:2])}.dist-info",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_model_config_and_hardware_file_travels(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (
        ("models", "*.py"),
        ("configs", "*.yaml"),
        ("hardware", "*.yaml"),
        ("tools/slurm", "*.sbatch"),
    ):
        files = list((REPO / folder).glob(pattern))
        assert files
        assert {f"meshtrain/bundled/{folder}/{path.name}" for path in files} <= names


def test_the_installed_wheel_trains(installed: Path, tmp_path: Path) -> None:
    """In an empty folder, as a user's: `configs/quickstart.yaml` and its model are those of the wheel."""
    where = run("-c", "import meshtrain; print(meshtrain.__file__)", cwd=tmp_path, PYTHONPATH=str(installed))
    assert Path(where.strip()).is_relative_to(installed)
    run("-m", "meshtrain.train", "configs/quickstart.yaml", *SHORT, cwd=tmp_path, PYTHONPATH=str(installed))
    rows = (tmp_path / "runs" / "quickstart" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2


def test_the_installed_wheel_plans(installed: Path, tmp_path: Path) -> None:
    plan = ("plan", "configs/quickstart.yaml", "--hosts", "4,2")
    shown = run("-m", "meshtrain.cli", *plan, cwd=tmp_path, PYTHONPATH=str(installed))
    assert "6 processes = 4 on host 0 + 2 on host 1" in shown
    # The console script is the same command.
    script = str(installed / "bin" / "meshtrain")
    assert run(script, *plan, cwd=tmp_path, PYTHONPATH=str(installed)) == shown


def test_the_installed_wheel_launches(installed: Path, tmp_path: Path) -> None:
    """The scripts of tools/slurm are the wheel's own."""
    job = ("--slurm", "--nodes", "2", "--gpus-per-node", "4", "--dry-run")
    script = run(
        "-m", "meshtrain.cli", "launch", "configs/quickstart.yaml", *job, cwd=tmp_path, PYTHONPATH=str(installed)
    )
    template = (REPO / "tools" / "slurm" / "train.sbatch").read_text()
    assert script.endswith(template.partition("\nset -euo")[2])
    assert "#SBATCH --nodes=2\n" in script
