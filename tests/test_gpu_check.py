"""tools/bench/gpu_check.sh on a machine without a GPU: its limits with made-up stages, and what each
stage makes of what it gets."""

import json
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import yaml

import gloo_on_gpu
import gpu_check
import gpu_docs
import gpu_stages
from gpu_check import Part, Stage
from meshtrain.config import Config
from meshtrain.job.process import Job
from tests.launching import ROOT, forked, run
from tests.parity.cells import assert_same
from tests.parity.experiments import QUICKSTART, experiments

MACHINE = {
    "stage": "machine",
    "time": "2026-11-30T07:00:00+00:00",
    "gpu": "NVIDIA H200",
    "capability": [9, 0],
    "memory_gib": 139.8,
    "torch": "2.11.0",
    "nccl": [2, 28, 9],
}


def fake(name: str, *rows: dict[str, Any], then: str = "", limit_s: float = 60) -> Part:
    """A process that writes rows, and then does something."""
    lines = ["from gpu_check import write_row", *(f"write_row({row!r})" for row in rows), then]
    return Part(name, ("-c", "\n".join(lines)), limit_s)


def result(stage: str, name: str, result: str = "good", **further: Any) -> dict[str, Any]:
    return {"stage": stage, "name": name, "result": result, **further}


# The shell script ---------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    script = str(ROOT / "tools" / "bench" / "gpu_check.sh")
    done = run([script], env={"OUT": str(tmp_path / "out"), "PYTHON": sys.executable})
    assert done.status == 2
    assert "finds no GPU here: this checks an NVIDIA GPU" in done.err
    again = run([script], env={"OUT": str(tmp_path / "out"), "PYTHON": sys.executable})
    assert again.status == 2
    assert "give an empty folder as OUT" in again.err


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nccl", [[2, 28, 9], [2, 30, 7], None])
def test_all_stages_together_take_eight_minutes(nccl: list[int] | None) -> None:
    stages = gpu_check.stages_for(MACHINE | {"nccl": nccl})
    assert [stage.name for stage in stages] == list(gpu_docs.STAGES)
    limits = gpu_check.MACHINE_S + sum(stage.limit_s for stage in stages)
    assert limits <= gpu_check.WHOLE_S == 480
    for stage in stages:
        assert all(part.limit_s <= stage.limit_s for part in stage.parts)
        assert all(part.arguments[1] in gpu_stages.STAGES for part in stage.parts)
    layouts = next(stage for stage in stages if stage.name == "layouts")
    assert layouts.at_once == (1 if nccl == [2, 30, 7] else 3)
    named = [name for stage in stages if stage.name == "tests" for name in stage.parts]
    assert len(named) == (4 if nccl == [2, 30, 7] else 3)


def test_each_group_of_tests_has_files_with_the_mark() -> None:
    """And each file with the mark is in a group."""
    grouped = [file for files in gpu_stages.GROUPS.values() for file in files]
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text() and path != Path(__file__)
    }
    assert sorted(grouped) == sorted(marked)


def test_a_stage_that_is_killed_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its processes, also those with a session of their own; the next stage still runs."""
    out, child = tmp_path / "out", tmp_path / "child"
    start = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep, start_new_session=True)\n"
        f"open({str(child)!r}, 'w').write(f'{{child.pid}}\\n')\n"
        "print('it has begun', flush=True)\n"
        "time.sleep(600)"
    )

    def wait(process: subprocess.Popen, limit_s: float) -> int:
        """Its time is over when the child runs."""
        if limit_s > 9:
            return process.wait()
        while not child.exists() or not child.read_text().endswith("\n"):
            assert process.poll() is None
        raise subprocess.TimeoutExpired("python", limit_s)

    monkeypatch.setattr(gpu_check, "wait", wait)
    of_tp = result("layouts", "tp", layout="{tp: 2}", by="gloo")
    hangs = fake("hangs", of_tp, then=start, limit_s=9)
    later = fake("later", result("layouts", "pp", "bad"), limit_s=-1)
    stages = [
        Stage("layouts", 60, (hangs, later)),
        Stage("memory", 60, (fake("memory", {"stage": "memory", "name": "M"}),)),
    ]
    assert gpu_check.check(out, fake("now", MACHINE), stages) == 0
    rows = gpu_check.read_rows(out / gpu_check.RESULTS)
    ended = {row["part"]: row["ended"] for row in rows if "part" in row}
    assert ended == {"now": "done", "hangs": "limit", "later": "not reached", "memory": "done"}
    assert [row["name"] for row in rows if "name" in row] == ["tp", "M"]
    assert "it has begun" in (out / gpu_check.LOG).read_text()
    page = (out / gpu_check.PAGE).read_text()
    assert "- layout {tp: 2} (tp) over gloo: as one rank" in page
    assert "- layouts: hangs: stopped at its limit of 9 s" in page
    assert "- layouts: later: its stage's time was over" in page
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(child.read_text())).status() == psutil.STATUS_ZOMBIE


def waits_for_a_result(thread: int) -> bool:
    frames = traceback.walk_stack(sys._current_frames()[thread])
    return any(frame.f_code is Future.result.__code__ for frame, _ in frames)


def test_ctrl_c_ends_what_runs_and_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen] = []

    def wait(process: subprocess.Popen, limit_s: float) -> int:
        started.append(process)
        main = threading.main_thread().ident  # this is a thread of the stage
        assert main is not None
        # An executor that is interrupted while it starts a thread does not wait for that thread.
        while not waits_for_a_result(main):
            assert process.poll() is None
        signal.pthread_kill(main, signal.SIGINT)
        return process.wait(limit_s)

    monkeypatch.setattr(gpu_check, "wait", wait)
    (tmp_path / gpu_check.RESULTS).touch()
    hangs, waits = (
        fake(name, then="import time; time.sleep(600)", limit_s=9) for name in ("one", "two")
    )
    # Tests that a shell has put into the background ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu_check.run_stage(Stage("layouts", 600, (hangs, waits)), tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.poll() for process in started] == [-signal.SIGKILL]
    rows = gpu_check.read_rows(tmp_path / gpu_check.RESULTS)
    assert [(row["part"], row["ended"]) for row in rows] == [("one", "failed")], "not at its limit"


def test_a_stage_that_crashes_does_not_end_the_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stages = [
        Stage("pair", 60, (fake("pair", result("pair", "turn 1"), then="raise SystemExit('no')"),)),
        Stage("kernels", 60, (fake("kernels", result("kernels", "K", kernels=["flash"])),)),
    ]
    assert gpu_check.check(out, fake("now", MACHINE), stages) == 1
    page = (out / gpu_check.PAGE).read_text()
    assert "- pair: pair crashed with status 1: no" in page
    assert "- K: `flash`" in page


def test_a_wrong_result_is_status_1(tmp_path: Path) -> None:
    wrong = fake("tests", result("tests", "test_x", "bad", why="E\nassert 1 == 2"))
    status = gpu_check.check(tmp_path, fake("now", MACHINE), [Stage("tests", 60, (wrong,))])
    assert status == 1
    page = (tmp_path / gpu_check.PAGE).read_text()
    assert page.splitlines()[:4] == [
        "# NVIDIA H200, 140 GiB, torch 2.11.0, NCCL 2.28.9, 2026-11-30",
        "",
        "## Not as it must be",
        "",
    ]
    assert "- tests: test_x: assert 1 == 2" in page


# Stages -------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """The rows that stages have written in this process."""
    file = tmp_path / "rows.jsonl"
    monkeypatch.setenv(gpu_check.ROWS, str(file))
    return lambda: gpu_check.read_rows(file)


def test_tests_write_their_results_one_by_one(tmp_path: Path, rows: Callable[[], list]) -> None:
    file = tmp_path / "test_gpu.py"
    file.write_text(
        "import os, pytest\n"
        "pytestmark = pytest.mark.gpu\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='needs 2 GPUs')\n"
        "def test_two(): pass\n"
        "def test_crash(): os._exit(9)\n"
        "def test_later(): pass\n"
    )
    broken = tmp_path / "test_broken.py"
    broken.write_text("import no_such_module\n")
    code = f"import gpu_stages; gpu_stages.run_tests({[str(broken), str(file)]!r})"
    options = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tools' / 'bench'}",
        gpu_check.ROWS: str(tmp_path / "rows.jsonl"),
        "PYTEST_ADDOPTS": "",
    }
    assert run([sys.executable, "-c", code], env=options, cwd=tmp_path).status == 9
    not_collected, right, wrong, two = rows()
    assert "no_such_module" in not_collected["why"]
    assert [row["result"] for row in rows()] == ["bad", "good", "bad", "unseen"]
    assert right["name"].endswith("test_gpu.py::test_right")
    assert "assert 1 == 2" in wrong["why"]
    assert two["why"] == "needs 2 GPUs"


VERIFIED = {
    "equal": {"status": "equal", "difference": 3e-15},
    "refused": {"status": "refused", "reason": "layout: no"},
    "different": {
        "status": "different",
        "step": 2,
        "parameter": "model.norm.weight",
        "difference": 0.5,
        "kind": "a factor of 2",
    },
}


@pytest.mark.parametrize("end", VERIFIED)
@pytest.mark.parametrize("nccl", [(2, 28, 9), (2, 30, 7)])
def test_layouts_are_compared_by_verify(
    end: str, nccl: tuple[int, ...], rows: Callable[[], list], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def verify(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        started.append((command, env))
        compared = {"layout": "{tp: 2}", **VERIFIED[end]}
        said = f"{{not JSON}}\n{json.dumps({'reference': '1', 'layouts': [compared]})}\nbye\n"
        return SimpleNamespace(stdout=said, returncode=int(end == "different"))

    monkeypatch.setattr(subprocess, "run", verify)
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: nccl), raising=False)
    assert gpu_stages.layouts("ep") == 0
    ((command, environment),) = started
    at = command.index("verify")
    assert command[at + 1 :] == [
        "configs/moe.yaml",
        "parallel.expert_parallel=2",
        "parallel.compile=false",
        "--layouts",
        "{dp_shard: 2}",
        "--steps=5",
        "--precision=float64",
        "--json",
    ]
    assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert ("gloo_on_gpu.py" in " ".join(command)) == (nccl < (2, 30))
    (row,) = rows()
    assert row["by"] == ("gloo" if nccl < (2, 30) else "NCCL")
    assert row["result"] == {"equal": "good", "refused": "unseen", "different": "bad"}[end]
    if end == "different":
        assert row["why"] == "step 2, model.norm.weight: differs by 0.5 (a factor of 2)"


def test_a_verify_that_says_nothing_is_a_crash() -> None:
    assert gpu_stages.verified("Traceback\n{}\n") is None
    assert gpu_stages.verified('{\n "layouts": []\n}\n') == {"layouts": []}


def test_memory_is_near_the_plan_and_a_workspace() -> None:
    assert gpu_stages.compare_memory(20.0, 20.1)["result"] == "good"
    far = gpu_stages.compare_memory(20.0, 22.0)
    assert (far["result"], far["why"][:7]) == ("bad", "+9.7 % ")
    assert gpu_stages.compare_memory(20.0, 19.0)["result"] == "bad"


def test_the_turns_of_a_pair_are_rows_before_its_end(rows: Callable[[], list]) -> None:
    said = "pair 1/6: 1.20 (0.61), 1.30 (0.70) CPU s (on the wall)\nother\n"
    code = f"import sys; sys.stderr.write({said!r}); sys.exit(1)"
    assert gpu_stages.follow([sys.executable, "-c", code], "plain") == 1
    (row,) = rows()
    assert (row["name"], row["seconds_of_turns"]) == ("turn 1 against plain", [0.61, 0.70])


def pair_result(apart: float) -> dict[str, Any]:
    side = {"tokens_per_s": 1e5, "mfu_causal": 0.5, "allocated": 2**30}
    return {
        "workload": "S",
        "sides": {
            "meshtrain": side | {"largest_difference_of_losses": 0.0},
            "plain": side | {"largest_difference_of_losses": apart},
        },
        "ratios": {"plain": {"median": 1.25, "low": 1.2, "high": 1.3, "coverage": 0.97}},
    }


def test_a_pair_with_other_losses_is_bad() -> None:
    good = gpu_stages.row_of_pair(pair_result(0.001), "plain")
    assert good["result"] == "good"
    assert gpu_docs.pair_line(good).startswith(
        "S against plain: meshtrain's tokens per second are 1.250 of the other side's (1.200 to "
        "1.300 with 97 %); meshtrain 100,000, plain 100,000;"
    )
    assert gpu_stages.row_of_pair(pair_result(0.02), "plain")["result"] == "bad"


def test_kernels_on_a_cpu(rows: Callable[[], list]) -> None:
    """The same code; the kernels are operators, and float8 is emulated."""
    assert gpu_stages.kernels("", device="cpu", size=64) == 0
    found = {row["name"]: row for row in rows()}
    assert len(found) == 9
    assert found["attention over cp: all"]["kernels"] == ["CpuFlash"]
    grouped = found["grouped experts: bfloat16 beside a loop"]
    assert (grouped["result"], grouped["fused"]) == ("good", False)
    assert found["float8: feed-forward block"]["result"] == "unseen"
    of_attention = [row for name, row in found.items() if name.startswith("attention: ")]
    assert all(len(row["kernels"]) == 2 and row["ms"] > 0 for row in of_attention)


# What needs ranks and runs ------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_each_operation_over_gloo_with_copies(job: Job) -> None:
    """With tensors of a CPU in the place of a GPU's, some of which are not contiguous."""
    if not hasattr(dist.Backend, gloo_on_gpu.NAME.upper()):
        gloo_on_gpu.register("cpu")
    group = dist.new_group([0, 1], backend=gloo_on_gpu.NAME)
    rank, other = job.rank, 1 - job.rank

    def mine() -> torch.Tensor:
        return torch.tensor([[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]]).t() * (rank + 1)

    both = torch.stack([mine() / (rank + 1), 2 * mine() / (rank + 1)])
    for op, expected in (
        (dist.ReduceOp.SUM, both.sum(0)),
        (dist.ReduceOp.AVG, both.mean(0)),
        (dist.ReduceOp.MAX, both[1]),
    ):
        x = mine()
        dist.all_reduce(x, op, group=group)
        assert torch.equal(x, expected)

    gathered = torch.empty(6, 2)
    work = dist.all_gather_into_tensor(gathered, mine().contiguous(), group, async_op=True)
    work.wait()
    assert torch.equal(gathered, both.flatten(0, 1))
    parts = [torch.empty(3, 2), torch.empty(3, 2)]
    dist.all_gather(parts, mine(), group)
    assert torch.equal(torch.stack(parts), both)

    scattered = torch.empty(2, 3)
    dist.reduce_scatter_tensor(scattered, both.view(4, 3) * (rank + 1), group=group)
    assert torch.equal(scattered, 3 * both.view(4, 3)[2 * rank : 2 * rank + 2])
    dist.reduce_scatter(scattered, [both.view(4, 3)[:2], both.view(4, 3)[2:]], group=group)
    assert torch.equal(scattered, 2 * both.view(4, 3)[2 * rank : 2 * rank + 2])

    # Rank 0 sends one row to itself and two to the other, which keeps none and sends three.
    sent, received = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])
    arrived = torch.empty(sum(received))
    rows = 10.0 * rank + torch.arange(3)
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    assert arrived.tolist() == ([0, 10, 11, 12] if rank == 0 else [1, 2])

    x = mine()
    dist.broadcast(x, group_src=1, group=group)
    assert torch.equal(x, both[1])
    # Both send first: neither waits for the other before it receives.
    work = dist.isend(mine(), group=group, group_dst=other)
    x = torch.empty(3, 2)
    dist.irecv(x, group=group, group_src=other).wait()
    work.wait()
    assert torch.equal(x, both[other])
    names: list[str | None] = [None, None]
    dist.all_gather_object(names, f"rank {rank}", group=group)
    assert names == ["rank 0", "rank 1"]
    dist.barrier(group)


@pytest.mark.parametrize("name", gpu_check.MODELS)
def test_a_model_whose_memory_is_measured_can_be_planned(name: str) -> None:
    config = Config.load(gpu_stages.CONFIG, gpu_stages.memory_overrides(name), world_size=1)
    assert config.data.seq_len * config.batch.micro_size == 4096


def test_layouts_that_are_compared_fit_two_ranks() -> None:
    for name, (config, overrides, layout) in gpu_check.LAYOUTS.items():
        keys = [*overrides, f"layout={layout}"]
        resolved = Config.load(str(ROOT / config), keys, world_size=2).resolved
        assert resolved is not None
        assert resolved.world_size == 2
        assert (resolved.size("ep") == 2) == (name == "ep")


@pytest.mark.slow
def test_layouts_over_gloo_with_copies_are_what_one_process_is(tmp_path: Path) -> None:
    known = experiments(tmp_path)["float64"]
    moe = tuple(key for key in known.overrides if not key.startswith("model"))
    cells: list[tuple[str, str, Sequence[str], str]] = [
        *(
            (QUICKSTART, "llama", known.overrides, f"layout={{{axis}: 2}}")
            for axis in ("dp_replicate", "dp_shard", "tp", "pp", "cp")
        ),
        (
            "configs/moe.yaml",
            "moe",
            (*moe, "model.num_hidden_layers=2", "parallel.expert_parallel=2"),
            "layout={dp_shard: 2}",
        ),
    ]
    runs = [
        [config, [*keys, layout, f"train.output={tmp_path / str(i)}"], 0]
        for i, (config, _, keys, layout) in enumerate(cells)
    ]
    file = tmp_path / "cells.json"
    file.write_text(json.dumps(runs))
    program = ROOT / "tools" / "bench" / "gloo_on_gpu.py"
    forked(2, program, "--on-cpu", "tests.parity.runs", file, timeout=280).check()

    alone = {
        name: [config, [k for k in keys if "expert_p" not in k], 0]
        for config, name, keys, _ in reversed(cells)
    }
    for name, cell in alone.items():
        cell[1] += ["layout={dp_shard: 1}", f"train.output={tmp_path / name}"]
    file.write_text(json.dumps(list(alone.values())))
    forked(1, "-m", "tests.parity.runs", file).check()
    for i, (_, name, _, _) in enumerate(cells):
        expected = gpu_check.read_rows(tmp_path / name / "metrics.jsonl")
        assert_same(gpu_check.read_rows(tmp_path / str(i) / "metrics.jsonl"), expected, 1e-9)


# Documents ----------------------------------------------------------------------------------------


def test_the_documents_say_what_the_cards_have_shown() -> None:
    """`python tools/bench/gpu_docs.py` writes both."""
    cards = gpu_docs.read_cards()
    claims = yaml.safe_load(gpu_docs.CLAIMS.read_text())
    performance, design = gpu_docs.PERFORMANCE.read_text(), gpu_docs.DESIGN.read_text()
    assert performance == gpu_docs.performance(performance, cards)
    assert design == gpu_docs.design(design, cards, claims)
    assert all(claim["what"] in design for claim in claims if "seen" not in claim)


CLAIMS = [
    {"what": "sinks", "where": "a", "how": "b", "seen": ["tests: *::test_sinks*"]},
    {"what": "experts over NCCL", "where": "a", "how": "b", "seen": ["layouts: ep by NCCL"]},
    {"what": "two nodes", "where": "a", "how": "b"},
]


@pytest.mark.parametrize(
    ("found", "left"),
    [
        ([], [0, 1, 2]),
        ([result("tests", "f.py::test_sinks[1]"), result("tests", "f.py::test_sinks[2]")], [1, 2]),
        (
            [result("tests", "f.py::test_sinks[1]"), result("tests", "f.py::test_sinks[2]", "bad")],
            [0, 1, 2],
        ),
        ([result("tests", "f.py::test_sinks[1]", "unseen", why="no")], [0, 1, 2]),
        ([result("layouts", "ep", by="gloo", layout="{}")], [0, 1, 2]),
        ([result("layouts", "ep", by="NCCL", layout="{}")], [0, 2]),
    ],
)
def test_a_claim_leaves_the_list_when_a_card_has_shown_it(
    found: list[dict[str, Any]], left: list[int]
) -> None:
    text = "<!-- not on GPUs: x -->\nold\n<!-- end of not on GPUs -->\n"
    made = gpu_docs.design(text, [[MACHINE, *found]], CLAIMS)
    assert [i for i, claim in enumerate(CLAIMS) if f"| {claim['what']} |" in made] == left
    assert "What one GPU (NVIDIA H200) has shown" in made
    assert "old" not in made


def test_a_card_s_results_become_a_section(tmp_path: Path) -> None:
    ran = [
        MACHINE,
        result("memory", "M", planned_gib=1.0, measured_gib=1.06),
        result("tests", "test_a", "unseen", why="needs 2 GPUs"),
        result("tests", "test_b", "unseen", why="needs 2 GPUs"),
        result("kernels", "float8", gain=1.5),
        {"stage": "pair", "part": "pair", "ended": "limit", "limit_s": 9, "said": "/home/me"},
        result("layouts", "pp", "bad", by="gloo", why="no"),
    ]
    out, cards = tmp_path / "out", tmp_path / "cards"
    out.mkdir()
    for row in ran:
        gpu_check.write_row(row, out / gpu_check.RESULTS)
    file = gpu_docs.add(out, cards)
    assert file.name == "h200.jsonl"
    assert "/home/me" not in file.read_text()
    text = "<!-- gpu: x -->\n<!-- end of gpu -->\n"
    section = gpu_docs.performance(text, gpu_docs.read_cards(cards)).splitlines()
    assert section == [
        "<!-- gpu: x -->",
        "",
        "### NVIDIA H200, 140 GiB, torch 2.11.0, NCCL 2.28.9, 2026-11-30",
        "",
        "- memory of M: planned 1.00 GiB, took 1.06 GiB",
        "- float8: 1.50 times as fast as bfloat16",
        "- **not right**: layouts: pp by gloo",
        "",
        "Not seen there:",
        "",
        "- tests: test_a and 1 more: needs 2 GPUs",
        "- pair: pair: stopped at its limit of 9 s",
        "",
        "<!-- end of gpu -->",
    ]
