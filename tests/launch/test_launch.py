"""`meshtrain launch`: what it refuses, the script that it writes, and what it says when it has
submitted it.

SLURM itself is not here: sbatch is a small stand-in on PATH. On a real cluster the scripts of
tools/slurm, and with them this one, run in tests/slurm.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.cli import main as cli
from meshtrain.job import locate
from meshtrain.launch.command import nodes_that_fit
from meshtrain.launch.request import seconds
from meshtrain.launch.script import block, render
from meshtrain.layout import Layout, LayoutError
from tests.properties import given, st

HERE = Path(__file__).parent
TEMPLATES = ("train.sbatch", "train-srun.sbatch")
NODES = ("--slurm", "--nodes", "4", "--gpus-per-node", "8")
SPLITTABLE = ("model.num_attention_heads=16", "model.num_key_value_heads=16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is run; there is no SLURM but the test's own."""
    (tmp_path / "here").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    return tmp_path / "here"


def launch(*words: str) -> int:
    return cli.main(["launch", "configs/quickstart.yaml", *words])


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The script of a job that fits."""
    assert launch("--dry-run", *words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def directives(script: str) -> dict[str, str]:
    """What sbatch reads: each option once, before the first command."""
    options = re.findall(
        r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script.partition("\nset ")[0], re.MULTILINE
    )
    assert len(dict(options)) == len(options) == len(re.findall(r"^#SBATCH", script, re.MULTILINE))
    return dict(options)


# The script ---------------------------------------------------------------------------------------


def words_of(case: dict[str, Any], folder: Path) -> list[str]:
    words = shlex.split(case["words"].replace("HERE", str(folder)))
    return words if case.get("alone") else [*NODES, *words]


def test_the_script_asks_for_what_was_asked_for(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder.parent / "modules.sh").touch()
    (folder / "x.sqsh").touch()
    for case in yaml.safe_load((HERE / "scripts.yaml").read_text().replace("HERE", str(folder))):
        script = dry_run(capsys, *words_of(case, folder))
        options = directives(script)
        assert {name: options.get(name) for name in case["options"]} == case["options"], case
        assert set(case["lines"]) <= set(script.splitlines()), case
        output = Path(options["output"])
        assert output.parent.is_dir(), "SLURM fails a job whose output has no folder"
        assert (output.parents[1] / "launch.sbatch").read_text() == script
        assert ("torchrun" in script.partition("set -euo")[2]) == (
            options["ntasks-per-node"] == "1"
        )


@pytest.mark.parametrize("word", ["train.steps=3", "layout={dp_shard: 32}"])
def test_srun_alone_leaves_the_words_behind_it_to_training(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = dry_run(capsys, *NODES, "--srun", word)
    assert directives(script)["ntasks-per-node"] == "8"
    assert f"set -- configs/quickstart.yaml {shlex.quote(word)}" in script.splitlines()
    assert cli.main(["launch", "--dry-run", *NODES, "--srun", "configs/quickstart.yaml", word]) == 0
    assert capsys.readouterr().out == script


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_script_is_its_template_but_for_the_jobs_values(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """tools/slurm is the one source: no line of a template is lost, but for the directives that the
    job sets, and for how the template itself is submitted."""
    template = (locate.bundled("tools/slurm") / name).read_text()
    script = dry_run(capsys, *NODES, *(["--srun"] if "srun" in name else []))
    *_, last = re.finditer(r"^#+SBATCH.*\n", template, re.MULTILINE)
    assert script.endswith(template[last.end() :])
    begin, end = template.index("#\n#   sbatch "), template.index("\n\n#SBATCH")
    usage = template[begin:end]
    for line in usage.splitlines():
        assert f"\n{line}\n" not in script
    kept = template.replace(usage, "").splitlines()
    others = {line for line in kept if not line.lstrip("#").startswith("SBATCH")}
    assert others <= set(script.splitlines())
    assert set(directives(template)) <= set(directives(script))
    checked = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_directives_are_replaced_added_and_taken_away() -> None:
    template = (
        "#!/bin/bash\n# about\n#SBATCH --nodes=2\n#SBATCH --requeue\n##SBATCH "
        "--partition=x\n##SBATCH --qos=y\n\nrun\n"
    )
    values = {"nodes": "3", "requeue": None, "partition": "p", "chdir": "/a b"}
    assert render(template, values, ["set -- x"]) == (
        "#!/bin/bash\n# about\n#SBATCH --nodes=3\n#SBATCH --partition=p\n##SBATCH --qos=y\n"
        '#SBATCH --chdir="/a b"\n\nset -- x\n\nrun\n'
    )
    for value in ('a"b', "a\nb", "a\\b"):
        with pytest.raises(ValueError, match="sbatch cannot read"):
            render(template, {"chdir": value}, [])


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        min_size=1,
        max_size=3,
    )
)
def test_words_reach_the_script_as_they_are(words: list[str]) -> None:
    """Overrides have quotes, braces, spaces and dollar signs in them, and the shell must see none
    of these."""
    lines = "\n".join(block(words, {"WORD": words[0]}, ["a remark\nof two lines"]))
    assert shlex.split(lines, comments=True)[-len(words) :] == words


def test_bash_reads_the_words_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.output=runs/it's $HOME `x` 100%", "layout={dp_shard: 32}"]
    script = dry_run(capsys, *NODES, *words)
    before = script.partition("\nset -euo")[0]
    printed = subprocess.run(
        ["bash"],
        input=before + "\nprintf '%s\\0' \"$@\"\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split("\0")[:-1] == ["configs/quickstart.yaml", *words]
    assert directives(script)["output"].endswith("/runs/it's $HOME `x` 100%%/logs/slurm-%j.out\"")


# What is refused ----------------------------------------------------------------------------------


def test_what_is_wrong_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written for a job that cannot be."""
    (folder / "file").touch()
    wrong = []
    for case in yaml.safe_load((HERE / "refusals.yaml").read_text()):
        status = launch("--dry-run", *words_of(case, folder))
        printed = capsys.readouterr()
        files = [path.name for path in folder.iterdir()]
        if (status, printed.out, files) != (2, "", ["file"]) or case["text"] not in printed.err:
            wrong.append((case, status, printed, files))
    assert wrong == []
    # this one is right, and its neighbour wrong
    dry_run(capsys, *NODES, "layout={dp_shard: -1, tp: 8}", *SPLITTABLE)


@given(
    sizes=st.dictionaries(
        st.sampled_from(["pp", "dp_shard", "tp"]), st.integers(1, 12), min_size=1
    ),
    free=st.booleans(),
    nodes=st.integers(1, 9),
    gpus=st.integers(1, 9),
)
def test_the_numbers_of_nodes_that_are_named_fit(
    sizes: dict[str, int], free: bool, nodes: int, gpus: int
) -> None:
    sizes |= {"dp_replicate": -1} if free else {}
    text = nodes_that_fit(sizes, nodes, gpus)
    counts = [int(count) for count in re.findall(r"--nodes (\d+)", text)]
    each = re.search(r"--gpus-per-node (\d+)", text)
    assert counts
    for count in counts:
        Layout.resolve(sizes, count * (int(each[1]) if each else gpus))
    if free:  # the nearest above and below, so that nothing between them fits
        for between in range(counts[0] + 1, counts[-1]):
            with pytest.raises(LayoutError):
                Layout.resolve(sizes, between * gpus)


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("240", 14400),
        ("5:30", 330),
        ("3:50:00", 13800),
        ("1-12", 129600),
        ("2-1:30", 178200),
        ("1-0:0:05", 86405),
    ],
)
def test_times_are_read_as_slurm_reads_them(time: str, expected: int) -> None:
    assert seconds(time) == expected


def test_what_each_node_may_have_of_its_own_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "env.sh").touch()
    words = ("--dry-run", "--activate", "env.sh")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder.parent))
        assert launch(*NODES, *words) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert [note.partition(" is ")[0] for note in notes] == [
            "note: train.output",
            "note: the environment",
        ]
        assert launch("--slurm", "--nodes", "1", "--gpus-per-node", "8", *words) == 0
    assert "note: " not in capsys.readouterr().err


# Submitting ---------------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in for one of SLURM's commands."""
    path = folder.parent / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def test_without_sbatch_nothing_is_written_and_what_it_says_is_passed_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(folder.parent / "bin"))
        assert launch(*NODES) == 2
    assert "run this where jobs are submitted, or with --dry-run" in capsys.readouterr().err
    assert not list(folder.iterdir())
    program(
        folder,
        "sbatch",
        "#!/bin/bash\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n",
    )
    assert launch(*NODES, "--partition", "gpu") == 1
    assert "invalid partition specified: gpu" in capsys.readouterr().err


SBATCH = """#!/bin/bash
[[ $1 == --parsable && $# -eq 2 ]] || exit 1
cp "$2" "$(dirname "$0")/submitted" && echo "4211;a-cluster"
"""


def test_what_was_submitted_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That the script trains is seen on a real SLURM (tests/slurm/test_cluster.py)."""
    program(folder, "sbatch", SBATCH)
    two = ("--slurm", "--nodes", "2", "--gpus-per-node", "1")
    assert launch(*two, "train.output=runs/a run") == 0
    printed = capsys.readouterr().out
    assert "2 nodes x 1 GPU: layout {dp_shard: 2}" in printed
    assert "as job 4211" in printed
    assert "tail -F 'runs/a run/logs/slurm-4211.out'" in printed
    submitted = (folder.parent / "bin" / "submitted").read_text()
    assert directives(submitted)["chdir"].strip('"') == str(folder)
    assert submitted == (folder / "runs" / "a run" / "launch.sbatch").read_text()
