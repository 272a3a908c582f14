"""Ranks that are killed or stopped, in training and in saves, under one and two agents and srun:
whose fault it was."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.launching import Finished, free_port, run_together, torchrun, two_hosts

FAULTS = {"kill": "is gone: process", "stop": r"is stopped \(SIGSTOP, or a debugger\): process"}
STEP_S = 6  # a deadline that is short, and long for such steps on a machine that does much else


def command(small: str, folder: Path, kind: str, rank: int, when: str) -> list[str]:
    """A long run with a fault: in step 6, or in the second save."""
    long = ("train.steps=100000", "optimizer.warmup_steps=0", "data.workers=1")
    limits = (f"train.step_timeout_s={STEP_S}", "train.start_timeout_s=60")
    overrides = [*long, *limits, f"train.output={folder}"]
    if when == "training":
        planted = f"train.chaos=[{{fault: {kind}, rank: {rank}, step: 6}}]"
        return ["-m", "meshtrain.train", small, *overrides, planted, "checkpoint.every=0"]
    in_background = f"checkpoint.in_background={when != 'synchronous save'}"
    in_save = ["-m", "tests.fault_in_save", kind, str(rank), "4"]
    return [*in_save, small, *overrides, "checkpoint.every=2", in_background]


def named(jobs: list[Finished], folder: Path, kind: str, rank: int) -> None:
    """Looks for what must be there, and nothing but that."""
    printed = "\n".join(job.out + job.err for job in jobs)
    assert all(job.status != 0 for job in jobs), printed
    verdicts = re.findall(
        r"^rank (\d) on host \S+ \(dp_shard \d\) stops, because (.*)$", printed, re.MULTILINE
    )
    assert sorted(int(by) for by, _ in verdicts) == [i for i in range(3) if i != rank], printed
    headline = rf"rank {rank} on host \S+ \(dp_shard {rank}\) {FAULTS[kind]} \d+ "
    assert all(re.match(headline, why) for _, why in verdicts), printed
    assert len({why for _, why in verdicts}) == 1, printed
    ended = json.loads((folder / "exit.json").read_text())
    assert (ended["status"], ended["reason"]) == ("failed", verdicts[0][1])
    assert ended["hosts"] == [socket.gethostname()]
    if kind == "stop":
        lowest = min(i for i in range(3) if i != rank)
        assert re.search(
            rf"^  .*\(ranks 0-2\): ranks? .* waits?, not arrived: {rank}$", printed, re.MULTILINE
        ), printed
        assert len(re.findall(r"^  ranks? [\d, -]+, in ", printed, re.MULTILINE)) in (1, 2), printed
        first = printed[printed.index(f"rank {lowest} on host") :]
        assert re.search(r"^      meshtrain/train\.py:\d+ train$", first, re.MULTILINE), (
            "the block has stacks"
        )


def test_a_killed_rank_is_named_under_one_agent(small: str, tmp_path: Path) -> None:
    job = torchrun(3, *command(small, tmp_path / "run", "kill", 0, "training"))
    named([job], tmp_path / "run", "kill", 0)


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_kills_and_stops_in_training_and_in_saves_under_one_and_two_agents(
    small: str, tmp_path: Path
) -> None:
    for agents in (1, 2):
        for kind in FAULTS:
            for i, when in enumerate(("training", "save", "synchronous save")):
                rank, folder = (i + agents) % 3, tmp_path / f"{agents}_{kind}_{i}"
                words = command(small, folder, kind, rank, when)
                named(
                    [torchrun(3, *words)] if agents == 1 else two_hosts((1, 2), *words),
                    folder,
                    kind,
                    rank,
                )


def srun(*words: str) -> list[Finished]:
    """Three tasks as srun starts them, without srun."""
    port = free_port()
    own = (
        "SLURM_NTASKS=3",
        "SLURM_NODEID=0",
        "SLURM_JOB_ID=7",
        "SLURM_STEP_ID=0",
        "MASTER_ADDR=127.0.0.1",
    )
    tasks = [
        [
            "env",
            *own,
            f"MASTER_PORT={port}",
            f"SLURM_PROCID={i}",
            f"SLURM_LOCALID={i}",
            sys.executable,
        ]
        for i in range(3)
    ]
    return run_together([[*task, *words] for task in tasks])


@pytest.mark.slow
def test_rank_0_of_srun_takes_the_store_along_and_is_named(small: str, tmp_path: Path) -> None:
    """Nobody signals those that are left, and with rank 0 the job's store is gone."""
    jobs = srun(*command(small, tmp_path / "run", "kill", 0, "training"))
    assert jobs[0].status == -9
    named(jobs, tmp_path / "run", "kill", 0)
