"""What one GPU shows in eight minutes: `tools/bench/gpu_check.sh` starts it.

    python tools/bench/gpu_check.py OUT

Stages run one after the other, the most telling first, each in processes of its own with a time
limit. Whatever a stage finds is a line of JSON in OUT/results.jsonl, written at once, so a stage
that is killed leaves what it had. OUT/page.md says at the end what was seen and what was not, and
OUT/log.txt has what the processes printed. gpu_stages.py is what runs in them; gpu_docs.py writes
the documentation from the results of several cards.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import gpu_docs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS, PAGE, LOG = "results.jsonl", "page.md", "log.txt"
# Names the file of results in the environment of the stages' processes.
ROWS = "MESHTRAIN_GPU_ROWS"
WHOLE_S = 480.0
MACHINE_S = 40.0  # the first import of torch from a cold disk
SHARES_A_GPU = (2, 30)  # the NCCL whose ranks may share one
LAST_LINES = 15
_one_at_a_time = threading.Lock()
_running: set[subprocess.Popen] = set()  # processes of parts

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A process of a stage: its name, and the arguments of python."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Stage:
    """Processes with a time limit for each and for all; `at_once`: how many run side by side."""

    name: str
    limit_s: float
    parts: tuple[Part, ...]
    at_once: int = 1


def stages_for(facts: Row) -> list[Stage]:
    """All stages on a machine. `facts`: the row of gpu_stages.py machine."""
    shares = shares_a_gpu(facts)

    def part(stage: str, name: str, limit_s: float) -> Part:
        return Part(name, (str(HERE / "gpu_stages.py"), stage, name), limit_s)

    groups = [("attention", 45.0), ("one process", 30.0), ("whole runs", 60.0)]
    if shares:
        groups.append(("several ranks", 40.0))
    return [
        Stage("tests", 130.0, tuple(part("tests", name, limit) for name, limit in groups)),
        Stage(
            "layouts",
            95.0,
            tuple(part("layouts", name, 60.0) for name in LAYOUTS),
            # Ranks of NCCL on one GPU wait on it for each other: not beside those of another job.
            at_once=1 if shares else 3,
        ),
        Stage("memory", 65.0, tuple(part("memory", name, 40.0) for name in MODELS)),
        Stage("pair", 100.0, (part("pair", "pair", 100.0),)),
        Stage("kernels", 45.0, (part("kernels", "kernels", 45.0),)),
    ]


def shares_a_gpu(facts: Row) -> bool:
    """Whether several ranks of NCCL may share a GPU."""
    return tuple(facts.get("nccl") or ()) >= SHARES_A_GPU


# What `verify` compares with one rank: config, overrides, layout.
MOE = ("parallel.expert_parallel=2",)
LAYOUTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "tp": ("configs/quickstart.yaml", (), "{tp: 2}"),
    "fsdp": ("configs/quickstart.yaml", (), "{dp_shard: 2}"),
    "pp": ("configs/quickstart.yaml", (), "{pp: 2}"),
    "cp": ("configs/quickstart.yaml", (), "{cp: 2}"),
    "ep": ("configs/moe.yaml", MOE, "{dp_shard: 2}"),
    "dp": ("configs/quickstart.yaml", (), "{dp_replicate: 2}"),
}
# Whose memory is planned and measured, one row of 4,096 tokens in bfloat16.
MODELS: dict[str, str] = {
    "Llama 3.2 1B": "{name: llama, preset: llama-3.2-1b}",
    "Qwen3 0.6B, 8 layers": "{name: qwen3, preset: qwen3-0.6b, num_hidden_layers: 8}",
    "Qwen3-MoE 0.5B": (
        "{name: qwen3_moe, hidden_size: 1024, moe_intermediate_size: 1792, num_hidden_layers: 8, "
        "num_attention_heads: 16, num_key_value_heads: 8, num_experts: 8, vocab_size: 32000, "
        "max_position_embeddings: 4096}"
    ),
}


# Results ------------------------------------------------------------------------------------------


def write_row(row: Row, file: Path | None = None) -> None:
    """Appends a result. `file`: by default the one that the environment names."""
    line = json.dumps(row) + "\n"
    # One write of a line at the end of the file: processes that run side by side do not mix.
    with open(file or os.environ[ROWS], "ab", buffering=0) as results:
        results.write(line.encode())


def read_rows(file: Path) -> list[Row]:
    """All complete lines of a file of results."""
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


# Running ------------------------------------------------------------------------------------------


def run_part(stage: str, part: Part, out: Path, deadline: float) -> None:
    """Runs a process until it ends or its time is over, and writes how it ended."""
    began = time.monotonic()
    limit_s = min(part.limit_s, deadline - began)
    row: Row = {"stage": stage, "part": part.name, "limit_s": round(max(0.0, limit_s), 1)}
    if limit_s <= 0:
        write_row(row | {"ended": "not reached", "seconds": 0.0}, out / RESULTS)
        return
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        status = run(part.arguments, out, printed.fileno(), limit_s)
        printed.seek(0)
        text = printed.read()
    seconds = round(time.monotonic() - began, 1)
    if status is None:
        row |= {"ended": "limit"}
    elif status == 0:
        row |= {"ended": "done"}
    else:
        row |= {"ended": "failed", "status": status}
    if status != 0:
        row["said"] = "\n".join(text.splitlines()[-LAST_LINES:])
    write_row(row | {"seconds": seconds}, out / RESULTS)
    with _one_at_a_time, (out / LOG).open("a") as log:
        log.write(f"== {stage}: {part.name}, {row['ended']} after {seconds} s\n{text}\n")
    print(f"{stage}: {part.name}: {row['ended']} after {seconds:.0f} s", flush=True)


def run(arguments: Sequence[str], out: Path, printed: int, limit_s: float) -> int | None:
    """The exit status of python with these arguments; None: its time was over."""
    path = os.pathsep.join(filter(None, (str(ROOT), str(HERE), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, ROWS: str((out / RESULTS).absolute())},
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=printed,
    )
    _running.add(process)
    try:
        return wait(process, limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_tree(process)
        _running.discard(process)


def wait(process: subprocess.Popen, limit_s: float) -> int:
    """The exit status. Raises TimeoutExpired."""
    return process.wait(limit_s)


def kill_tree(process: subprocess.Popen) -> None:
    """Ends a process and what it started: torchrun's ranks have sessions of their own, and would
    stay on the GPU."""
    if process.poll() is None:
        root = psutil.Process(process.pid)
        for each in [root, *root.children(recursive=True)]:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        process.wait()


def run_stage(stage: Stage, out: Path) -> None:
    deadline = time.monotonic() + stage.limit_s
    with ThreadPoolExecutor(stage.at_once) as pool:
        try:
            list(pool.map(lambda part: run_part(stage.name, part, out, deadline), stage.parts))
        except BaseException:
            # Ctrl-C, or SIGTERM: what waits does not start any more, and the threads would wait for
            # their processes until the limit.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                kill_tree(process)
            raise


def check(out: Path, machine: Part, stages: Sequence[Stage] | None = None) -> int:
    """Runs everything; returns the exit status. `stages`: those of the machine."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / RESULTS
    if results.exists():
        print(f"{results} is there already: give an empty folder as OUT", file=sys.stderr)
        return 2
    began = time.monotonic()
    run_part("machine", machine, out, began + MACHINE_S)
    rows = read_rows(results)
    facts = next((row for row in rows if row["stage"] == "machine" and "gpu" in row), None)
    if facts is None:
        print(f"nothing was checked: {rows[-1].get('said') or rows[-1]['ended']}", file=sys.stderr)
        return 2
    page = ""
    for stage in stages_for(facts) if stages is None else stages:
        run_stage(stage, out)
        # After each, so that there is one if all of it is ended from outside.
        rows = read_rows(results)
        page = gpu_docs.page(rows)
        (out / PAGE).write_text(page)
    print(f"\n{page}\n{time.monotonic() - began:.0f} s; results in {out}")
    return int(any(gpu_docs.is_bad(row) for row in rows))


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python tools/bench/gpu_check.py OUT", file=sys.stderr)
        return 2
    # so that it ends what it has started: a rank that stays on the GPU is in the way of the next
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    when = datetime.now(UTC).isoformat(timespec="seconds")
    machine = Part(when, (str(HERE / "gpu_stages.py"), "machine", when), MACHINE_S)
    return check(Path(sys.argv[1]), machine)


if __name__ == "__main__":
    sys.exit(main())
