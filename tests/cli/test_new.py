"""The project that `meshtrain new` writes: whole, refused where something lies, and its own test
passes."""

import subprocess
import sys
from pathlib import Path

import pytest

from meshtrain.cli.main import main


def test_a_project_is_whole_and_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "project"
    assert main(["new", str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "README.md",
        "data.py",
        "job.sbatch",
        "model.py",
        "test_model.py",
        "train.yaml",
    }
    monkeypatch.chdir(folder)
    for layout in ("{dp_shard: 2, tp: 2, pp: 2}", "{dp_replicate: 8}"):
        assert main(["plan", "train.yaml", "--hosts", "8", f"layout={layout}"]) == 0
    capsys.readouterr()
    assert main(["new", str(folder)]) == 2
    assert "has files in it, which stay as they are" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "a b; x")]) == 0
    assert f"cd '{tmp_path}/a b; x'\n" in capsys.readouterr().out
    assert main(["new", str(folder / "train.yaml")]) == 2
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.cluster  # it takes most of a minute
def test_the_projects_own_test_passes(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "project")]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model.py"]
    done = subprocess.run(
        command, cwd=tmp_path / "project", capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
