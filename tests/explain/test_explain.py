"""`meshtrain explain`: from the logs of a failed job to its cause, whatever the logs look like."""

import fcntl
import gzip
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshtrain.cli import main as cli
from meshtrain.errors import InputError
from meshtrain.explain import log_reader
from meshtrain.explain.causes import Cause, explain, names
from meshtrain.explain.command import explanation
from meshtrain.explain.log_reader import pieces, time_of, without_prefix
from meshtrain.explain.rules import Rule, load_rules
from meshtrain.job.watchdog import records
from meshtrain.job.watchdog.diagnose import diagnose
from tests.job.fakes import rank, waits
from tests.launching import ROOT

RULES = load_rules()
LOGS = Path(__file__).parent / "logs"
TABLES = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text())
OOM, WATCHDOG, CONFIG = (TABLES["words"][word] for word in ("OOM", "WATCHDOG", "CONFIG"))


def causes(*paths: Path) -> list[Cause]:
    return explain([str(path) for path in paths], RULES)


def ids(*paths: Path) -> list[str]:
    return [cause.id for cause in causes(*paths)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Logs of all kinds --------------------------------------------------------------------------------


def test_real_logs_are_explained() -> None:
    for name, (first, *followed) in TABLES["real"].items():
        explained = causes(LOGS / f"{name}.log")
        assert explained[0].id == first, name
        consequences = {cause.id for cause in explained if cause.role == "consequence"}
        assert consequences - {first} == set(followed), name
    killed = causes(LOGS / "killed.log")[0]
    assert list(killed.matches.ranks) == ["rank 1"], "known by torchrun's summary"


def filled(text: str) -> str:
    """A text of the table with its capital words replaced."""
    words = TABLES["words"]
    return re.sub("|".join(words), lambda match: words[match[0]], text)


def summary(cause: Cause, expected: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What a row of the table says of a cause, of it."""
    matches = cause.matches
    values = {
        "id": cause.id,
        "role": cause.role,
        "ranks": list(matches.ranks),
        "count": matches.count,
        "line": matches.evidence[0].line,
        "seen in": [str(Path(line.file).relative_to(folder)) for line in matches.evidence],
        "options": list(cause.options)[: len(expected.get("options", ()))],
    }
    return {name: value for name, value in values.items() if name in expected}


def test_made_logs_are_explained(tmp_path: Path) -> None:
    for name, row in TABLES["made"].items():
        folder = tmp_path / name[:100]
        files = [
            write(folder / file, f"{filled(text)}\n" if text else "")
            for file, text in row["files"].items()
        ]
        alone = files if len(files) == 1 else [folder]
        explained = causes(*(folder / file for file in row.get("reads", alone)))
        assert len(explained) == len(row["causes"]), f"{name}: {explained}"
        for cause, expected in zip(explained, row["causes"], strict=True):
            compared = {key: value for key, value in expected.items() if not key.endswith("says")}
            assert summary(cause, expected, folder) == compared, name
            assert filled(expected.get("says", "")) in cause.cause, name
            assert (
                "never says" not in expected or filled(expected["never says"]) not in cause.cause
            ), name


def test_ranks_are_named_in_short() -> None:
    for text, ranks in TABLES["names"].items():
        assert names(ranks) == text


def test_a_healthy_log_has_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("clean", "clean_torchrun"):
        assert cli.main(["explain", str(LOGS / f"{name}.log")]) == 0
        assert capsys.readouterr().out.startswith("no failure found\n")
        assert cli.main(["explain", "--json", str(LOGS / f"{name}.log")]) == 0
        assert json.loads(capsys.readouterr().out) == []


def test_json_is_a_list_of_causes_most_likely_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(LOGS / "killed.log")
    assert cli.main(["explain", "--json", path]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert [cause["role"] for cause in printed] == [
        "root",
        "consequence",
        "consequence",
        "consequence",
    ]
    assert all(
        {"id", "cause", "fix", "evidence"} <= set(cause) and cause["evidence"] for cause in printed
    )
    line = printed[0]["evidence"][0]
    assert (line["file"], line["rank"]) == (path, "rank 1")
    assert Path(path).read_text().splitlines()[line["line"] - 1].split() == line["text"].split()
    write(tmp_path / "config.yaml", CONFIG)
    log = write(tmp_path / "job.txt", OOM)
    assert "batch.micro_size=4 (now 8" in causes(log)[0].to_json()["fix"]


# What a job has found out itself ------------------------------------------------------------------


LOST_BY = {
    "RANK_GONE": [rank(0, wait=waits()), rank(1, reach="gone")],
    "RANK_STOPPED": [rank(0, wait=waits()), rank(1, reach="stopped")],
    "HOST_UNREACHABLE": [rank(0), rank(1, "b", "unreachable"), rank(2, "b", "unreachable")],
    "RANK_SILENT": [rank(0), rank(1, reach="silent")],
    "RANK_ABSENT": [rank(0, wait=waits(ranks=(0, 1))), rank(1)],
    "RANKS_STUCK": [rank(i, wait=waits(number=7), begun={"0,1,2,3": 7}) for i in range(4)],
    "RANKS_DEADLOCKED": [
        rank(0, wait=waits(missing=(1,))),
        rank(1, wait=waits(over="tp", missing=(0,))),
    ],
}


KINDS = {rule.kind: rule.id for rule in RULES if rule.kind is not None}
BY_ANOTHER = (
    "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:14214.\n"
)


def first(log: Path) -> tuple[str, list[str], int]:
    """The first cause, the ranks that it is about, and how often it is said."""
    cause = causes(log)[0]
    return cause.id, list(cause.matches.ranks), cause.matches.count


def failure(kind: str, text: str, *ranks: int) -> str:
    """The line in which a job says for programs what it was lost by."""
    fields = {
        "kind": kind,
        "ranks": ranks,
        "hosts": ["b"],
        "step": 7,
        "phase": "step",
        "text": text,
    }
    return f"MESHTRAIN_FAILURE {json.dumps(fields)}\n"


def test_what_a_job_found_out_itself_comes_first(tmp_path: Path) -> None:
    """The block on the output of the lowest rank alive, among what all the others say."""
    for cause, reports in LOST_BY.items():
        verdict = diagnose(reports, hangs=True)
        assert verdict is not None
        log = write(
            tmp_path / cause / "job.txt",
            f"{BY_ANOTHER}rank 0 on host a (dp_shard 0) stops, because {verdict.text}\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
        )
        assert ids(log)[0] == cause
        run = tmp_path / cause / "run"
        write(run / "config.yaml", CONFIG)
        write(
            run / "exit.json",
            json.dumps({"status": "failed", "code": 1, "reason": verdict.headline, "step": 5}),
        )
        assert ids(run)[0] == cause
        log.write_text(
            f"train.chaos: {reports[1].name}: kill strikes, as planted\n{log.read_text()}"
        )
        assert ids(log)[0] == "PLANTED"


def test_a_broken_failure_line_does_no_harm(tmp_path: Path) -> None:
    long = [3_900 * "[", 100_000 * "[", '{"kind": "gone", "ranks": [' + 9_999 * "1, "]
    for fields in (*TABLES["broken diagnoses"], *long):
        log = write(tmp_path / "job.txt", f"MESHTRAIN_FAILURE {fields}\n{OOM}\n")
        assert "CUDA_OOM" in ids(log), fields[:60]


def test_a_jobs_own_diagnosis_is_read_by_its_kind(tmp_path: Path) -> None:
    """Whatever its words are; the ranks are those that the job was lost by, and not the one that
    says it."""
    for kind, id_ in KINDS.items():
        log = write(tmp_path / "job.txt", BY_ANOTHER + failure(kind, "in words of its own", 1, 3))
        assert first(log) == (id_, ["rank 1", "rank 3"], 1)
        assert causes(log)[0].matches.evidence[0].text == "in words of its own"
    kinds = set(records.DiagnosisKind)
    assert kinds - set(KINDS) <= {"failed", "ended", "training", "input"}, "whose texts rules know"
    assert set(KINDS) <= kinds
    hosts = tuple(f"node{i:04d}.cluster" for i in range(512))
    lost = records.Diagnosis(
        records.DiagnosisKind.UNREACHABLE, tuple(range(4096)), "nobody answers", hosts=hosts
    )
    log.write_text(f"[rank4096]:{records.failure_line(lost, 'step', 7)}\n")
    assert first(log) == (KINDS["unreachable"], [f"rank {rank}" for rank in range(4096)], 1)


def test_a_diagnosis_stands_once_for_people_and_once_for_programs(tmp_path: Path) -> None:
    """The line of JSON counts, and a line of it that was cut off does no harm."""
    verdict = diagnose(LOST_BY["RANK_GONE"], hangs=True)
    assert verdict is not None
    block = f"rank 0 on host a (dp_shard 0) stops, because {verdict.text}\n"
    line = failure("gone", verdict.headline, 1)
    for text in (block + line, line + block):
        assert first(write(tmp_path / "job.txt", text)) == ("RANK_GONE", ["rank 1"], 1)
    assert first(write(tmp_path / "job.txt", f"{line[:60]}\n{block}"))[:2] == (
        "RANK_GONE",
        ["rank 0"],
    )


def test_a_run_without_an_end_was_killed_unless_a_job_holds_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", CONFIG)
    lock = write(tmp_path / ".lock", "process 1 on host a\n")
    assert ids(tmp_path) == ["RUN_VANISHED"]
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert ids(tmp_path) == []


# Logs as they are ---------------------------------------------------------------------------------


def test_prefixes_and_times_of_launchers() -> None:
    for text, bare, who in TABLES["prefixes"]:
        assert without_prefix(text) == (bare, who)
    times = [time_of(text) for text in TABLES["times"]]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert time_of("Tom 21 00:43:19 and 12:00:01") is None


def test_a_line_is_found_in_whatever_it_is_wrapped(tmp_path: Path) -> None:
    colours = OOM.replace("CUDA", "\x1b[31mCUDA\x1b[0m").replace(
        "OfMemory", "\x1b[1mOfMemory\x1b[0m"
    )
    disguises = {
        "colours": f"{colours}\n",
        "a progress bar": f"  3%|#   | 1/9\r  6%|##  | 2/9\r{OOM}\n",
        "a long line": f"{'x' * 200_000} {OOM}\n",
        "two pieces of a long line": f"{'x' * 3_700}{OOM}\n",
        "Windows": f"{OOM}\r\n",
        "zeros": "\x00".join(f"{OOM}\n"),
        "no end": OOM,
    }
    path = tmp_path / "job.txt"
    for name, text in disguises.items():
        path.write_bytes(f"one\ntwo\n{text}".encode())
        (cause,) = causes(path)
        assert (cause.id, cause.matches.evidence[0].line, cause.matches.count) == (
            "CUDA_OOM",
            3,
            1,
        ), name
        # a state of a progress bar is a line of its own
        assert "2/9" not in cause.matches.evidence[0].text


def test_blocks_begin_and_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line numbers hold whatever the block's size, also where it ends between CR and LF."""
    text = "alpha\r\nbe\rta\n\n" + OOM + "\r\ngamma"
    path = tmp_path / "job.txt"
    path.write_bytes(text.encode())
    for size in range(1, 40):
        monkeypatch.setattr(log_reader, "BLOCK", size)
        (cause,) = causes(path)
        assert (cause.matches.evidence[0].line, cause.matches.count) == (4, 1), size


def test_packed_logs_and_those_cut_off_while_packing(tmp_path: Path) -> None:
    packed = gzip.compress(
        (OOM + "\n" + "".join(f"{random.random()}\n" for _ in range(20_000))).encode()
    )
    path = tmp_path / "job.log.gz"
    for content in (packed, packed[: len(packed) // 2]):
        path.write_bytes(content)
        assert ids(path) == ["CUDA_OOM"]
    assert ids(tmp_path) == ["CUDA_OOM"]  # it is a log of the folder, too


def test_standard_input_is_a_log_too_and_needs_no_torch() -> None:
    code = (
        "import sys; from meshtrain.cli.main import main; "
        "status = main(['explain', '-', '--json']); assert 'torch' not in sys.modules; "
        "sys.exit(status)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=f"a\n{OOM}\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    (cause,) = json.loads(done.stdout)
    assert (cause["id"], cause["evidence"][0]["line"]) == ("CUDA_OOM", 2)


def test_garbage_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    noise = random.Random(3)
    path.write_bytes(
        noise.randbytes(1_500_000) + b"\n" + OOM.encode() + b"\n" + noise.randbytes(500_000)
    )
    assert "CUDA_OOM" in ids(path)


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    with path.open("w") as file:
        for n in range(12):
            file.write(f"[rank{n}]: {OOM}\n" * 300)
        for _ in range(24):
            file.write("x" * 1_000_000)  # a line without end
    tracemalloc.start()
    try:
        (cause,) = causes(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cause.matches.count == 3_600
    assert len(cause.matches.evidence) <= 4
    assert peak < 14 * 2**20 < path.stat().st_size


def test_a_long_line_is_searched_in_pieces_that_overlap() -> None:
    line = "".join(chr(97 + n % 26) for n in range(20_000))
    parts = list(pieces(line.encode()))
    assert max(map(len, parts)) <= log_reader.LONGEST
    assert all(
        any(line[n : n + log_reader.OVERLAP] in part for part in parts)
        for n in range(0, 19_500, 97)
    )


# The command --------------------------------------------------------------------------------------


def test_wrong_input_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(tmp_path / "none.log")]) == 2
    assert "there is no log" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["explain", str(tmp_path / "empty")]) == 2
    assert "has no logs and is no run's folder" in capsys.readouterr().err
    if os.geteuid() != 0:
        secret = write(tmp_path / "secret.log", "x")
        secret.chmod(0)
        with pytest.raises(InputError, match="cannot be read"):
            causes(secret)


def test_the_documents_example_is_what_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, printed, *_ = re.findall(
        r"```text\n(.*?)```", (ROOT / "docs" / "failures.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write(Path("job.log"), log)
    assert cli.main(["explain", "job.log"]) == 1
    assert capsys.readouterr().out == printed


def test_what_is_shown_moves_no_cursor_and_fits_any_terminal(tmp_path: Path) -> None:
    log = tmp_path / "job.txt"
    log.write_bytes(f"\x1b]0;title\x07\x1b[2J\u009b31m{OOM} \u2764\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "meshtrain.cli", "explain", str(log)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"CUDA out of memory" in b" ".join(done.stdout.split())  # wherever a line ends
    assert not set(done.stdout) - set(range(32, 127)) - {10}


def test_the_text_keeps_to_the_width() -> None:
    explained = causes(LOGS / "barrier.log")
    for width in (60, 110):
        long = [line for line in explanation(explained, width).splitlines() if len(line) > width]
        # a path is not broken
        assert all(" " not in line.strip() or "/" in line for line in long), long


STRANGE_CONFIGS = {
    "a date that is none": "model: 2001-99-99",
    "a long integer": "model: " + 5_000 * "1",
    "deep": 3_000 * "[",
    "an escape beyond Unicode": r'model: "\UFFFFFFFF"',
    "large": "model: " + (1 << 20) * "a",
    "no UTF-8": "model: \udcff",
}


@pytest.mark.parametrize("case", STRANGE_CONFIGS)
def test_a_strange_config_beside_a_log_does_no_harm(case: str, tmp_path: Path) -> None:
    """Anybody may have put it into a folder above; the evidence that was found counts."""
    (tmp_path / "config.yaml").write_text(STRANGE_CONFIGS[case], errors="surrogateescape")
    assert ids(write(tmp_path / "logs" / "job.txt", OOM)) == ["CUDA_OOM"]


def test_a_config_beside_a_log_that_is_no_file_is_passed_over(tmp_path: Path) -> None:
    log, config = (
        write(tmp_path / "run" / "logs" / "job.txt", OOM),
        tmp_path / "run" / "config.yaml",
    )
    write(tmp_path / "config.yaml", CONFIG)
    os.mkfifo(config)  # which nobody writes to
    assert "(now 8" in causes(log)[0].to_json()["fix"], "the next one above"
    config.unlink()
    config.symlink_to("/dev/zero")
    assert "(now 8" in causes(log)[0].to_json()["fix"]
    config.unlink()
    config.symlink_to(
        write(tmp_path / "elsewhere", CONFIG.replace("micro_size: 8", "micro_size: 6"))
    )
    assert "(now 8" in causes(log)[0].to_json()["fix"], "nobody has named this file"
    assert "(now 6" in causes(config.parent)[0].to_json()["fix"], (
        "and here the folder that has it is named"
    )


def test_a_runs_folder_with_strange_files(tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", CONFIG)
    for text in (100_000 * "[", "[1]", '{"status": 3}'):
        write(tmp_path / "exit.json", text)
        assert all(isinstance(name, str) for name in ids(tmp_path))
    (tmp_path / "exit.json").unlink()
    os.mkfifo(tmp_path / "exit.json")
    os.mkfifo(tmp_path / ".lock")
    assert ids(tmp_path), "nobody waits for a writer"


def test_lines_without_a_literal_are_not_looked_at_for_each_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a log of a hundred megabytes takes minutes."""
    asked: list[str] = []
    may_match = Rule.may_match
    monkeypatch.setattr(
        Rule, "may_match", lambda rule, lower: asked.append(rule.id) or may_match(rule, lower)
    )
    noise = "step 1/9  loss 2.5\n" * 500
    log = write(tmp_path / "job.txt", noise + f"{OOM}\n{WATCHDOG}\n" + noise)
    found = causes(log)
    assert {"CUDA_OOM"} < {cause.id for cause in found}
    assert [
        line.line for cause in found if cause.id == "CUDA_OOM" for line in cause.matches.evidence
    ] == [501]
    assert len(asked) < 20


def test_of_many_lines_the_first_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    """By their times, and where they have none by their places."""
    times = [f"2026-11-28 10:{minute:02d}:00 {OOM}" for minute in (30, 20, 50, 10, 40, 5)]
    log = write(tmp_path / "job.txt", "\n".join([OOM, *times]) + "\n")
    (cause,) = causes(log)
    assert [line.line for line in cause.matches.evidence] == [7, 5, 3, 2]
    assert cause.matches.count == 7
