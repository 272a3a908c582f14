"""How a process joins its job, and what the ranks tell one another through its store."""

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from meshtrain.errors import (
    AgreedError,
    DiskError,
    InputError,
    TrainingError,
    UnreadableError,
)
from meshtrain.job import process as runtime
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job, choose_allocator
from meshtrain.job.store import Round
from tests.job.fakes import on_ranks, place
from tests.launching import ROOT, environment

JOIN = """
import json, resource, sys, torch
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from meshtrain.job.environment import Environment
from meshtrain.job.process import join
join(Environment("none", 0, 1, 0, "a", None))
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1 << 19) for _ in range(16)]
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), faults]))
"""


def test_a_process_that_joins_may_open_as_many_files_as_the_system_allows_and_keeps_its_memory() -> (
    None
):
    command = [sys.executable, "-c", JOIN, "64", "700"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=True
    )
    limits, faults = json.loads(done.stdout)
    assert limits == [700, 700]
    # Of 32 MiB in pages of 4 KiB: 8,192 in every round where glibc gives them back. A round may
    # find no room for a tensor among what was kept.
    assert min(faults[2:]) < 100, faults


def test_the_memory_of_a_gpu_grows_in_segments_unless_the_user_chooses() -> None:
    variables = {}
    choose_allocator(variables)
    assert variables == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        variables = {name: "backend:cudaMallocAsync"}
        choose_allocator(variables)
        assert variables == {name: "backend:cudaMallocAsync"}


@pytest.mark.parametrize(
    ("hard", "refused"), [(4607, True), (4608, False), (resource.RLIM_INFINITY, False)]
)
def test_who_serves_the_store_has_a_descriptor_for_each_rank(
    monkeypatch: pytest.MonkeyPatch, hard: int, refused: bool
) -> None:
    new_limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: new_limits.append(limits))
    serves = Environment("srun", 0, 4096, 0, "a", ("a", 1), hosts_store=True)
    if refused:
        with pytest.raises(InputError, match=r"store to 4096 ranks.*takes 4608.*limit is 4607"):
            runtime._open_files(serves)
        runtime._open_files(Environment("srun", 1, 4096, 1, "a", ("a", 1)))
    else:
        runtime._open_files(serves)
    assert new_limits == [(hard, hard)]


CRASH = """
import os, sys
from meshtrain.job.environment import Environment
from meshtrain.job.process import join
join(Environment("none", 0, 1, 0, "a", None))

def reads_what_is_gone():
    os.kill(os.getpid(), int(sys.argv[1]))

reads_what_is_gone()
"""


@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGBUS, "Bus error"), (signal.SIGSEGV, "Segmentation fault")]
)
def test_a_crash_says_what_it_was_and_where(number: int, word: str) -> None:
    command = [sys.executable, "-c", CRASH, str(int(number))]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False
    )
    assert done.returncode == -number
    assert f"Fatal Python error: {word}" in done.stderr
    assert "in reads_what_is_gone" in done.stderr


def test_a_gather_leaves_nothing_in_the_store() -> None:
    world, store = 64, dist.HashStore()
    jobs = [Job(place(rank, world), torch.device("cpu"), store) for rank in range(world)]
    for number in range(3):
        answers = on_ranks(world, lambda rank: jobs[rank].gather("testing", [rank, number]))  # noqa: B023
        assert answers == [[[rank, number] for rank in range(world)]] * world
    keys = [
        key
        for i in (1, 2, 3)
        for key in ("given", "count", "all")
        if store.check([f"round {i}/{key}"])
    ]
    assert keys == ["all"], "the last answer alone, which somebody may still have to read"


def test_a_gather_waits_until_each_value_is_counted() -> None:
    store, looks = dist.HashStore(), []

    def count_the_value_of_rank_1() -> None:
        looks.append(meeting.missing())
        store.add("meeting/count", 1)

    meeting = Round(store, 0, 2, "meeting", meanwhile=count_the_value_of_rank_1)
    meeting.put("a")
    store.append("meeting/given", '[1, "b"]\n')
    assert meeting.gather() == ["a", "b"]
    assert looks == [[1]]
    assert not store.check(["meeting/count"])


@pytest.mark.parametrize(
    "case", yaml.safe_load(Path(__file__).with_name("problems.yaml").read_text())
)
def test_ranks_with_the_same_problem_are_told_as_ranges_and_not_all_problems_are(
    case: dict[str, Any],
) -> None:
    problems, store = case["problems"], dist.HashStore()

    def fail(problem: str) -> None:
        if problem:
            raise InputError(problem)

    def check(rank: int) -> None:
        job = Job(place(rank, len(problems)), torch.device("cpu"), store)
        with pytest.raises(AgreedError) as agreed, job.collective_check("reading"):
            fail(problems[rank])
        assert str(agreed.value) == case["text"]

    on_ranks(len(problems), check)


def test_what_all_ranks_are_told_is_made_on_rank_0() -> None:
    store, counts = dist.HashStore(), []
    jobs = [Job(place(rank, 3), torch.device("cpu"), store) for rank in range(3)]

    def total(values: list[int]) -> int:
        counts.append(len(values))
        return sum(values)

    assert on_ranks(3, lambda rank: jobs[rank].reduce("testing", rank, total)) == [3, 3, 3]
    assert counts == [3]


def test_a_file_that_is_out_of_reach_is_told_with_the_line_that_wanted_it() -> None:
    """It may be a mistake in the user's code, and no traceback is shown."""
    job = Job(place(0, 1), torch.device("cpu"), None)
    place_of_it = rf"opening: host a: .*'/no/such/file' \({re.escape(__file__)}:\d+\)$"
    with pytest.raises(TrainingError, match=place_of_it), job.collective_check("opening"):
        os.stat("/no/such/file")
    with (
        pytest.raises(DiskError, match=r"host a cannot read f: gone$"),
        job.collective_check("opening"),
    ):
        raise UnreadableError("f", "gone")
    with pytest.raises(DiskError, match=r"host a: .*stale"), job.collective_check("opening"):
        raise OSError(errno.ESTALE, "stale", "f")
