"""`meshtrain explain`: from the logs of a failed job to its cause, whatever the logs look like."""

import gzip
import json
import os
import random
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from meshtrain.cli import main as cli
from meshtrain.errors import InputError
from meshtrain.explain import log_reader as lines
from meshtrain.explain.causes import Cause, explain, names
from meshtrain.explain.command import explanation
from meshtrain.explain.log_reader import pieces, time_of, without_prefix
from meshtrain.explain.rules import load_rules
from meshtrain.job.watchdog import records
from meshtrain.job.watchdog.diagnose import diagnose
from tests.job.test_diagnose import rank, waits

RULES = load_rules()
LOGS = Path(__file__).parent / "logs"
REPO = Path(__file__).parents[2]
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB"
WATCHDOG = (
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
    "Timeout(ms)=600000) ran for 600027 milliseconds before timing out."
)
CONFIG = """\
model: {name: llama, num_attention_heads: 16}
data: {source: text, workers: 4, prefetch: 2}
layout: {dp_replicate: 2, dp_shard: 4, tp: 2}
batch: {global_size: 512, micro_size: 8}
parallel: {recompute: none, sequence_parallel: true, reshard_after_forward: true}
optimizer: {lr: 0.003, warmup_steps: 20, clip_norm: null}
train: {steps: 100, precision: float32, on_nonfinite: stop}
"""


def causes(*paths: Path) -> list[Cause]:
    return explain([str(path) for path in paths], RULES)


def ids(*paths: Path) -> list[str]:
    return [one.id for one in causes(*paths)]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# Logs that really happened ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cause", "followed"),
    [
        ("barrier", "MONITORED_BARRIER", {"GLOO_TIMEOUT", "SIGTERM_COLLATERAL", "WORKER_FAILED"}),
        ("collective_kinds", "COLLECTIVE_MISMATCH", {"SIGTERM_COLLATERAL", "WORKER_FAILED"}),
        ("collective_types", "COLLECTIVE_MISMATCH", {"WORKER_FAILED"}),
        ("collective_sizes", "GLOO_SIZE_MISMATCH", {"GLOO_CLOSED", "SIGTERM_COLLATERAL", "WORKER_FAILED"}),
        ("collective_skipped", "GLOO_TIMEOUT", {"SIGTERM_COLLATERAL", "WORKER_FAILED"}),
        ("endpoint_not_given", "MASTER_ADDR_IGNORED", {"RDZV_JOIN_TIMEOUT"}),
        ("ids_differ", "RDZV_JOIN_TIMEOUT", set()),
        ("killed", "KILLED_9", {"GLOO_CLOSED", "SIGTERM_COLLATERAL", "WORKER_FAILED"}),
        ("nnodes_differ", "RDZV_JOIN_TIMEOUT", set()),
        ("no_launcher", "ENV_MISSING", set()),
        ("port_in_use", "PORT_IN_USE", set()),
        ("web_server_on_port", "RDZV_FOREIGN_SERVER", {"RDZV_CONNECTION", "STORE_UNREACHABLE"}),
        ("weights_only", "WEIGHTS_ONLY", set()),
    ],
)
def test_real_logs_are_explained(name: str, cause: str, followed: set[str]) -> None:
    found = causes(LOGS / f"{name}.log")
    assert found[0].id == cause
    assert {one.id for one in found if one.role == "consequence"} - {cause} == followed


@pytest.mark.parametrize("name", ["clean", "clean_torchrun"])
def test_a_healthy_log_has_no_failure(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(LOGS / f"{name}.log")]) == 0
    assert capsys.readouterr().out.startswith("no failure found\n")
    assert cli.main(["explain", "--json", str(LOGS / f"{name}.log")]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_hang_names_the_rank_that_did_not_come_and_not_torchruns_first(capsys: pytest.CaptureFixture[str]) -> None:
    """torchrun's summary calls rank 0 the root, which waited in vain for rank 1."""
    assert cli.main(["explain", str(LOGS / "collective_skipped.log")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Rank 1 reported nothing of the kind: look there first." in said
    assert "What followed from it: - SIGTERM_COLLATERAL of rank 1" in said


def test_the_killed_rank_is_known_by_torchruns_summary() -> None:
    (killed, *_) = causes(LOGS / "killed.log")
    assert list(killed.matches.ranks) == ["rank 1"]


def test_json_is_a_list_of_causes_most_likely_first(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(LOGS / "killed.log")
    assert cli.main(["explain", "--json", path]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["role"] for one in found] == ["root", "consequence", "consequence", "consequence"]
    assert all({"id", "cause", "fix", "evidence"} <= set(one) and one["evidence"] for one in found)
    line = found[0]["evidence"][0]
    assert line["file"] == path
    assert Path(path).read_text().splitlines()[line["line"] - 1].split() == line["text"].split()
    assert line["rank"] == "rank 1"


# Root and consequence -----------------------------------------------------------------------------------------------


def test_times_order_the_logs_of_several_ranks(tmp_path: Path) -> None:
    """Two ranks fail by themselves; what failed first comes first, whatever the order of the files."""
    late = write(tmp_path / "rank_0.log", "2026-11-21 10:00:09,5 disk\nOSError: [Errno 28] No space left on device\n")
    early = write(tmp_path / "rank_3.log", f"2026-11-21 10:00:02,1 x\n{OOM}\n")
    found = causes(late, early)
    assert [one.id for one in found] == ["CUDA_OOM", "DISK_FULL"]
    assert list(found[0].matches.ranks) == ["rank 3"]


def test_time_outs_of_many_ranks_do_not_hide_the_one_that_failed(tmp_path: Path) -> None:
    text = "".join(f"[rank{n}]:[E1121 10:10:0{n}.1 ProcessGroupNCCL.cpp:1] [Rank {n}] {WATCHDOG}\n" for n in range(7))
    log = write(tmp_path / "job.txt", f"{text}[rank7]:   File 'x.py'\n[rank7]: {OOM}\n")
    found = causes(log)
    assert (found[0].id, found[0].role, list(found[0].matches.ranks)) == ("CUDA_OOM", "root", ["rank 7"])
    assert (found[1].id, found[1].role, found[1].matches.count) == ("NCCL_WATCHDOG", "consequence", 7)


def test_a_rank_that_is_behind_is_named(tmp_path: Path) -> None:
    form = (
        "[rank{0}]:[E1121 10:00:0{0}.1 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank {0}] Exception "
        "(either an error or timeout) detected by watchdog at work: 42, last enqueued NCCL work: {1}, last completed "
        "NCCL work: 41.\n"
    )
    log = write(tmp_path / "job.txt", "".join(form.format(n, 41 if n == 2 else 43) for n in range(4)))
    (found,) = causes(log)
    assert "rank 2 had only begun collective 41, others 43" in found.cause


def test_a_job_that_hung_until_it_was_cancelled_has_hung(tmp_path: Path) -> None:
    cancelled = "slurmstepd: error: *** JOB 4211 ON node1 CANCELLED AT 2026-11-21T{} ***\n"
    hung = f"[rank1]:[E1121 10:00:00.1 ProcessGroupNCCL.cpp:1] [Rank 1] {WATCHDOG}\n"
    log = write(tmp_path / "job.txt", hung + cancelled.format("11:30:00"))
    assert ids(log) == ["NCCL_WATCHDOG", "SLURM_CANCELLED"]
    # What times out in the seconds after it is no cause.
    log.write_text(cancelled.format("09:59:58") + hung)
    assert ids(log) == ["SLURM_CANCELLED", "NCCL_WATCHDOG"]


def test_a_rank_whose_log_ends_without_a_word_is_looked_at_first(tmp_path: Path) -> None:
    """Killed by SIGKILL a rank writes nothing; the other one's broken connection is all that the logs show."""
    closed = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7555: Connection reset by peer."
    write(tmp_path / "logs/attempt_0/0/stderr.log", f"{closed}\n")
    write(tmp_path / "logs/attempt_0/1/stderr.log", "")
    (found,) = causes(tmp_path / "logs")
    assert (found.id, found.role) == ("GLOO_CLOSED", "consequence")
    assert "Local rank 1 reported nothing of the kind: look there first." in found.cause


CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:7555: Connection reset by peer."
SILENT = " reported nothing of the kind: look there first."


def process(folder: Path, err: str, out: str = "step 1/9  loss 2.1\nUserWarning: NCCL is slow\n") -> None:
    """The two logs that torchrun writes for a process."""
    write(folder / "stderr.log", f"{err}\n")
    write(folder / "stdout.log", out)


def test_a_number_of_torchruns_logs_is_that_of_a_node(tmp_path: Path) -> None:
    """Two nodes have one each; whoever knows its number in the job goes by that."""
    logs = tmp_path / "node7/logs/slurm-7.0"
    for node, local, text in ((0, 0, CLOSED), (0, 1, CLOSED), (1, 0, f"[rank2]: {CLOSED}"), (1, 1, "")):
        process(logs / f"node_{node}/7_x/attempt_0/{local}", text)
    (found,) = causes(logs)
    assert list(found.matches.ranks) == ["local rank 0 of node 0", "local rank 1 of node 0", "rank 2"]
    assert found.cause.endswith(f" Local rank 1 of node 1{SILENT}")
    assert names(list(found.matches.ranks)) == "rank 2 and local rank 0-1 of node 0"
    assert names([f"rank {i}" for i in (*range(8), 10)]) == "rank 0-7, 10"
    assert names([f"rank {2 * i}" for i in range(8)]) == "rank 0, 2, 4, 6, 8, 10 and 2 more"
    assert names(["local rank 0 of node 10", "local rank 3 of node 2"]) == (
        "local rank 3 of node 2 and local rank 0 of node 10"
    )


def test_who_says_its_number_in_one_of_its_logs_has_said_it(tmp_path: Path) -> None:
    for local in range(3):
        process(tmp_path / f"attempt_0/{local}", f"[rank{local}]: {CLOSED}" if local < 2 else "")
    (found,) = causes(tmp_path)
    assert found.cause.endswith(f" Local rank 2{SILENT}")


def test_processes_of_different_nodes_and_starts_are_different_ones(tmp_path: Path) -> None:
    process(tmp_path / "a/attempt_0/0", "")
    process(tmp_path / "b/attempt_0/0", f"[rank1]: {CLOSED}")
    (found,) = causes(tmp_path)
    assert found.cause.endswith(f" Local rank 0{SILENT}")
    process(tmp_path / "a/attempt_1/0", f"[rank0]: {CLOSED}")
    process(tmp_path / "b/attempt_1/0", f"[rank1]: {CLOSED}")
    (found,) = causes(tmp_path)
    assert SILENT not in found.cause, "in the last start both have told it"


def test_what_a_rank_tells_of_another_one_is_that_ones(tmp_path: Path) -> None:
    log = write(
        tmp_path / "job.txt",
        f"rank 3 on host b (dp_shard 3) stops, because rank 2 on host b (dp_shard 2) failed: {OOM}\n",
    )
    found = causes(log)
    assert [(one.id, list(one.matches.ranks)) for one in found] == [
        ("CUDA_OOM", ["rank 2"]),
        ("OTHER_RANK_FAILED", ["rank 3"]),
    ]


LOST_BY = {
    "RANK_GONE": [rank(0, wait=waits()), rank(1, reach="gone")],
    "RANK_STOPPED": [rank(0, wait=waits()), rank(1, reach="stopped")],
    "HOST_UNREACHABLE": [rank(0), rank(1, "b", "unreachable"), rank(2, "b", "unreachable")],
    "RANK_SILENT": [rank(0), rank(1, reach="silent")],
    "RANK_ABSENT": [rank(0, wait=waits(ranks=(0, 1))), rank(1)],
    "RANKS_STUCK": [rank(i, wait=waits(number=7), begun={"0,1,2,3": 7}) for i in range(4)],
    "RANKS_DEADLOCKED": [rank(0, wait=waits(missing=(1,))), rank(1, wait=waits(over="tp", missing=(0,)))],
}


@pytest.mark.parametrize("cause", LOST_BY)
def test_what_a_job_found_out_itself_comes_first(cause: str, tmp_path: Path) -> None:
    """The block on the output of the lowest rank alive, among what all the others say."""
    verdict = diagnose(LOST_BY[cause], hangs=True)
    assert verdict is not None
    log = write(
        tmp_path / "job.txt",
        "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14214.\n"
        f"rank 0 on host a (dp_shard 0) stops, because {verdict.text}\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
    )
    assert ids(log)[0] == cause
    run = tmp_path / "run"
    write(run / "config.yaml", CONFIG)
    write(run / "exit.json", json.dumps({"status": "failed", "code": 1, "reason": verdict.headline, "step": 5}))
    assert ids(run)[0] == cause
    planted = f"train.chaos: {LOST_BY[cause][1].name}: kill strikes, as planted\n"
    log.write_text(planted + log.read_text())
    assert ids(log)[0] == "PLANTED"


def failure(kind: str, text: str, *ranks: int) -> str:
    """The line in which a job says for programs what it was lost by."""
    fields = {"kind": kind, "ranks": ranks, "hosts": ["b"], "step": 7, "phase": "step", "text": text}
    return f"MESHTRAIN_FAILURE {json.dumps(fields)}\n"


@pytest.mark.parametrize(
    "fields",
    [
        '{"kind": "gone", "text": "x", "ranks": [-1]}',
        '{"kind": "gone", "text": "x", "ranks": [Infinity]}',
        '{"kind": ["gone"], "text": "x", "ranks": []}',
        3_900 * "[",
        100_000 * "[",
        '{"kind": "gone", "ranks": [' + 9_999 * "1, ",
    ],
)
def test_a_broken_failure_line_does_no_harm(fields: str, tmp_path: Path) -> None:
    text = "RuntimeError: CUDA error: out of memory\n"
    causes(write(tmp_path / "job.txt", f"MESHTRAIN_FAILURE {fields}\n{text}"))


KINDS = {rule.kind: rule.id for rule in RULES if rule.kind is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_a_jobs_own_diagnosis_is_read_by_its_kind(kind: str, tmp_path: Path) -> None:
    """Whatever its words are; the ranks are those that the job was lost by, and not the one that says it."""
    closed = "[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:14214.\n"
    said = failure(kind, "in words of its own", 1, 3)
    first = causes(write(tmp_path / "job.txt", closed + said))[0]
    assert (first.id, list(first.matches.ranks)) == (KINDS[kind], ["rank 1", "rank 3"])
    assert first.matches.evidence[0].text == "in words of its own"


def test_a_diagnosis_of_thousands_of_ranks_is_read_whole(tmp_path: Path) -> None:
    hosts = tuple(f"node{i:04d}.cluster" for i in range(512))
    lost = records.Diagnosis(records.DiagnosisKind.UNREACHABLE, tuple(range(4096)), "nobody answers", hosts=hosts)
    said = f"[rank4096]:{records.failure_line(lost, 'step', 7)}\n"
    first = causes(write(tmp_path / "job.txt", said))[0]
    assert (first.id, list(first.matches.ranks)) == (KINDS["unreachable"], [f"rank {rank}" for rank in range(4096)])


def test_a_diagnosis_stands_once_for_people_and_once_for_programs(tmp_path: Path) -> None:
    """The line of JSON counts, and a line of it that was cut off does no harm."""
    verdict = diagnose(LOST_BY["RANK_GONE"], hangs=True)
    assert verdict is not None
    block = f"rank 0 on host a (dp_shard 0) stops, because {verdict.text}\n"
    said = failure("gone", verdict.headline, 1)
    for text in (block + said, said + block):
        (gone, *_) = causes(write(tmp_path / "job.txt", text))
        assert (gone.id, list(gone.matches.ranks), gone.matches.count) == ("RANK_GONE", ["rank 1"], 1)
    (gone, *_) = causes(write(tmp_path / "job.txt", said[:60] + "\n" + block))
    assert (gone.id, list(gone.matches.ranks)) == ("RANK_GONE", ["rank 0"])


def test_an_exception_in_a_diagnosis_is_known_by_its_text(tmp_path: Path) -> None:
    said = failure("failed", f"rank 2 on host b (dp_shard 2) failed: {OOM}", 2)
    (cause,) = causes(write(tmp_path / "job.txt", said))
    assert (cause.id, list(cause.matches.ranks)) == ("CUDA_OOM", ["rank 2"])
    block = f"rank 0 on host a stops, because rank 2 on host b (dp_shard 2) failed: {OOM}\n"
    (cause, *_) = causes(write(tmp_path / "job.txt", block + said))
    assert (cause.id, list(cause.matches.ranks), cause.matches.count) == ("CUDA_OOM", ["rank 2"], 1)
    (cause,) = causes(write(tmp_path / "job.txt", failure("failed", "rank 2 on host b failed: OddError: odd", 2)))
    assert cause.id == "PYTHON_EXCEPTION"


def test_every_kind_of_diagnosis_has_a_rule_or_a_text_that_rules_know() -> None:
    known = set(records.DiagnosisKind)
    assert known - set(KINDS) <= {"failed", "ended", "training", "input"}
    assert set(KINDS) <= known


def test_an_unknown_exception_is_told_and_known_ones_are_not_told_twice(tmp_path: Path) -> None:
    head = '[rank1]: Traceback (most recent call last):\n[rank0]: all is well\n[rank1]:   File "a.py", line 2, in f\n'
    log = write(tmp_path / "job.txt", f"{head}[rank1]: mine.OddError: it is odd\n[rank1]: ValueError: only a line\n")
    (found,) = causes(log)
    assert (found.id, found.matches.evidence[0].line) == ("PYTHON_EXCEPTION", 4)
    assert "raised mine.OddError" in found.cause
    log.write_text(f"{head}[rank1]: {OOM}\n")
    assert ids(log) == ["CUDA_OOM"]
    log.write_text("ValueError: a text that a model wrote\n")  # no traceback
    assert ids(log) == []


def test_the_last_start_of_a_job_counts_most(tmp_path: Path) -> None:
    start = "x: 4 processes = 1 host x 4, on NVIDIA H100 over NCCL, met at a:29500 by srun\nstep 1/9  loss 2\n"
    log = write(tmp_path / "job.txt", f"{start}{OOM}\n{start}OSError: [Errno 28] No space left on device\n")
    assert ids(log) == ["DISK_FULL", "CUDA_OOM"]
    folder = tmp_path / "logs"
    write(folder / "attempt_0/1/stderr.log", f"{OOM}\n")
    write(folder / "attempt_1/0/stderr.log", "OSError: [Errno 28] No space left on device\n")
    assert ids(folder) == ["DISK_FULL", "CUDA_OOM"]


def test_warnings_of_a_job_that_works_are_no_failure(tmp_path: Path) -> None:
    warning = (
        "[W socket.cpp:663] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved (gai error: -2)\n"
    )
    log = write(tmp_path / "job.txt", warning)
    assert ids(log) == ["HOST_NOT_RESOLVED"]
    log.write_text(f"{warning}step 1/100  loss 4.1\n")
    assert ids(log) == []
    log.write_text(f"{warning}step 1/100  loss 4.1\n{OOM}\n")
    assert ids(log) == ["CUDA_OOM", "HOST_NOT_RESOLVED"]


# A run's folder, and its own options --------------------------------------------------------------------------------


def test_a_runs_folder_is_read_with_its_last_words(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run / "config.yaml", CONFIG)
    write(run / "metrics.jsonl", '{"step": 1, "loss": NaN}\n')
    reason = f"rank 2 on host b (dp_shard 2) failed: {OOM}"
    write(run / "exit.json", json.dumps({"status": "failed", "code": 1, "reason": reason, "step": 7}))
    (found,) = causes(run)
    assert (found.id, list(found.matches.ranks)) == ("CUDA_OOM", ["rank 2"])
    assert found.matches.evidence[0].file == str(run / "exit.json")

    write(run / "logs/2.log", f"2026-11-21T10:00:00 x\n{OOM}\n")
    (found,) = causes(run)
    assert [line.file for line in found.matches.evidence] == [str(run / "logs/2.log"), str(run / "exit.json")]

    write(run / "exit.json", json.dumps({"status": "failed", "code": 1, "reason": "ended by SIGXCPU", "step": 7}))
    assert ids(run) == ["CUDA_OOM", "RUN_FAILED"]
    write(run / "exit.json", '{"status": "fai')
    assert ids(run) == ["CUDA_OOM", "RUN_FAILED"]


def test_a_run_that_ended_well_has_no_failure_whatever_came_before(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run / "config.yaml", CONFIG)
    write(run / "logs/0.log", f"{OOM}\n")
    for status in ("done", "stopped"):
        write(run / "exit.json", json.dumps({"status": status, "code": 0, "reason": "all steps are done", "step": 9}))
        assert ids(run) == []


def test_a_run_without_an_end_was_killed_unless_a_job_holds_its_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(run / "config.yaml", CONFIG)
    write(run / ".lock", "process 1 on host a\n")
    assert ids(run) == ["RUN_VANISHED"]
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert ids(run) == []
        holder.communicate("\n", timeout=20)


def test_out_of_memory_is_answered_with_the_runs_own_options(tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", CONFIG)
    log = write(tmp_path / "logs/slurm-7.0/node_0/job/attempt_0/3/stderr.log", f"{OOM}\n")
    (found,) = causes(log)
    assert found.options[:5] == (
        "batch.micro_size=4 (now 8; the step and its loss stay the same)",
        "parallel.recompute=full (now none)",
        "layout.dp_replicate=1 layout.dp_shard=8 (now 2 copies of 4 shards)",
        "layout.tp=4 layout.dp_shard=2 (now 2 and 4)",
        "train.precision=bfloat16 (now float32)",
    )
    assert "batch.micro_size=4 (now 8" in found.to_json()["fix"]
    smallest = CONFIG.replace("micro_size: 8", "micro_size: 1").replace("recompute: none", "recompute: full")
    write(tmp_path / "config.yaml", smallest.replace("dp_replicate: 2, dp_shard: 4, tp: 2", "dp_shard: -1, tp: 8"))
    (found,) = causes(log)
    assert found.options[:2] == (
        "more processes: layout.dp_shard is -1 and takes them all",
        "train.precision=bfloat16 (now float32)",
    )
    (tmp_path / "config.yaml").unlink()
    (found,) = causes(log)
    assert found.options[:2] == (
        "a smaller batch.micro_size (the step and its loss stay the same)",
        "parallel.recompute=full",
    )


def test_other_failures_are_answered_with_the_runs_options_too(tmp_path: Path) -> None:
    write(tmp_path / "config.yaml", CONFIG)
    log = write(tmp_path / "job.txt", "step 9: the loss is not finite (rank 1 on host a: samples 81, 90).\n")
    assert causes(log)[0].options == (
        "optimizer.lr=0.0015 (now 0.003)",
        "optimizer.warmup_steps=100 (now 20)",
        "optimizer.clip_norm=1.0 (now null)",
        "train.on_nonfinite=skip leaves such steps out (now stop)",
    )
    log.write_text("RuntimeError: DataLoader worker (pid 2213) is killed by signal: Killed.\n")
    assert causes(log)[0].options == ("data.workers=0, or fewer (now 4)", "data.prefetch=1 (now 2)")


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n", "server: {port: 1}\n", "\xff\xfe", "batch: 3\nmodel: 1\ntrain: []\n"]
)
def test_another_config_beside_the_log_does_no_harm(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
    assert ids(write(tmp_path / "job.txt", f"{OOM}\n")) == ["CUDA_OOM"]


# Logs as they are ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bare", "who"),
    [
        ("[rank3]: text", "text", "rank 3"),
        ("[default12]: text", "text", "local rank 12"),
        ("[default0]:[rank3]:   File", "  File", "rank 3"),
        ("[trainer3|1]: text", "text", "local rank 3"),
        (" 7: text", "text", "rank 7"),
        ("[pod/job-1/main] [rank2]: text", "text", "rank 2"),
        ("2026-11-21T10:00:00.123456789Z stderr F [rank2]: text", "text", "rank 2"),
        ("rank 5 on host b (tp 1): text", "rank 5 on host b (tp 1): text", "rank 5"),
        ("[E1121 ProcessGroupNCCL.cpp:1] [Rank 4] text", "[E1121 ProcessGroupNCCL.cpp:1] [Rank 4] text", "rank 4"),
        ("text: of nobody", "text: of nobody", None),
    ],
)
def test_prefixes_of_launchers(text: str, bare: str, who: str | None) -> None:
    assert without_prefix(text) == (bare, who)


def test_times_of_all_kinds_have_one_order() -> None:
    written = [
        "[rank0]:[E1121 00:43:15.856600120 ProcessGroupGloo.cpp:67]",
        "2026-11-21 00:43:16,123 INFO",
        "[W1121 00:43:16.2 socket.cpp]",
        "  time      : 2026-11-21_00:43:17",
        "slurmstepd: error: *** JOB 1 ON a CANCELLED AT 2026-11-21T00:43:18 ***",
        "Nov 21 00:43:19 host kernel: x",
        "2026-12-01T00:00:00Z",
    ]
    times = [time_of(text) for text in written]
    assert None not in times
    assert times == sorted(times)  # type: ignore[type-var]
    assert time_of("Tom 21 00:43:19 and 12:00:01") is None


@pytest.mark.parametrize(
    "disguise",
    [
        lambda text: text.replace("CUDA", "\x1b[31mCUDA\x1b[0m").replace("OfMemory", "\x1b[1mOfMemory\x1b[0m"),
        lambda text: "  3%|#   | 1/9\r  6%|##  | 2/9\r" + text,
        lambda text: "x" * 200_000 + " " + text,
        lambda text: text.replace("\n", "\r\n"),
        "\x00".join,
        lambda text: "x" * 3_700 + text,  # in two pieces of a long line
        lambda text: text.rstrip("\n"),
    ],
    ids=["colours", "progress", "long", "windows", "nul", "cut", "endless"],
)
def test_a_line_is_found_in_whatever_it_is_wrapped(disguise, tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    path.write_bytes(("one\ntwo\n" + disguise(OOM + "\n")).encode())
    (found,) = causes(path)
    assert (found.id, found.matches.evidence[0].line, found.matches.count) == ("CUDA_OOM", 3, 1)
    assert "2/9" not in found.matches.evidence[0].text  # a state of a progress bar is a line of its own


def test_blocks_begin_and_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Line numbers hold whatever the block's size, also where it ends between CR and LF."""
    text = "alpha\r\nbe\rta\n\n" + OOM + "\r\ngamma"
    path = tmp_path / "job.txt"
    path.write_bytes(text.encode())
    for size in range(1, 40):
        monkeypatch.setattr(lines, "BLOCK", size)
        (found,) = causes(path)
        assert (found.matches.evidence[0].line, found.matches.count) == (4, 1), size


def test_packed_logs_and_those_cut_off_while_packing(tmp_path: Path) -> None:
    packed = gzip.compress((OOM + "\n" + "".join(f"{random.random()}\n" for _ in range(20_000))).encode())
    path = tmp_path / "job.log.gz"
    for content in (packed, packed[: len(packed) // 2]):
        path.write_bytes(content)
        assert ids(path) == ["CUDA_OOM"]
    assert ids(tmp_path) == ["CUDA_OOM"]  # it is a log of the folder, too


def test_standard_input_is_a_log_too() -> None:
    command = [sys.executable, "-m", "meshtrain.cli", "explain", "-", "--json"]
    done = subprocess.run(command, input=f"a\n{OOM}\n", capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    (found,) = json.loads(done.stdout)
    assert (found["id"], found["evidence"][0]["line"]) == ("CUDA_OOM", 2)


def test_garbage_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "job.txt"
    noise = random.Random(3)
    path.write_bytes(noise.randbytes(1_500_000) + b"\n" + OOM.encode() + b"\n" + noise.randbytes(500_000))
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
        (found,) = causes(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.matches.count == 3_600
    assert len(found.matches.evidence) <= 4
    assert peak < 14 * 2**20 < path.stat().st_size


def test_a_long_line_is_searched_in_pieces_that_overlap() -> None:
    line = "".join(chr(97 + n % 26) for n in range(20_000))
    parts = list(pieces(line.encode()))
    assert max(map(len, parts)) <= lines.LONGEST
    assert all(any(line[n : n + lines.OVERLAP] in part for part in parts) for n in range(0, 19_500, 97))


# The command --------------------------------------------------------------------------------------------------------


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


def test_the_text_has_the_line_the_cause_and_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "config.yaml", CONFIG)
    log = write(tmp_path / "job.txt", f"[rank1]: {OOM}\n[rank0]: {WATCHDOG}\n")
    assert cli.main(["explain", str(log)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("1. CUDA_OOM (root) cause The GPU's memory is full.")
    assert f"seen {log}:1 (rank 1): {OOM}" in said
    assert "- batch.micro_size=4 (now 8; the step and its loss stay the same)" in said
    assert f"What followed from it: - NCCL_WATCHDOG of rank 0: {log}:2: {WATCHDOG[:100]}" in said


def test_the_documents_example_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, said, *_ = re.findall(r"```text\n(.*?)```", (REPO / "docs" / "failures.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    write(Path("job.log"), log)
    assert explanation(causes(Path("job.log"))) == said


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
    found = causes(LOGS / "barrier.log")
    for width in (60, 110):
        long = [line for line in explanation(found, width).splitlines() if len(line) > width]
        assert all(" " not in line.strip() or "/" in line for line in long), long  # a path is not broken


def test_it_answers_without_torch() -> None:
    code = (
        "import sys; from meshtrain.cli.main import main; "
        f"main(['explain', {str(LOGS / 'killed.log')!r}]); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
