"""Which checkpoints a run may resume from, and in which order (whole runs: test_resume.py,
test_local.py)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshtrain.checkpoint.candidates import Candidate, Candidates
from meshtrain.checkpoint.directory import name_of

CHECKPOINTS = Path("/run/checkpoints")
DISK: Any = SimpleNamespace(own=Path("/disk/rank_00000"))
SPEC: Any = SimpleNamespace(
    checkpoints=CHECKPOINTS,
    config=SimpleNamespace(checkpoint=SimpleNamespace(resume="/other")),
)
RANKS = 4


def shared(step: int, folder: Path = CHECKPOINTS) -> Candidate:
    return Candidate(folder / name_of(step))


def on_disk(step: int) -> Candidate:
    return Candidate(DISK.own / name_of(step), f"digest {step}")


def add(candidates: Candidates, *steps: int, having: int = RANKS) -> Candidates:
    """Local disks offer these steps, to `having` of the ranks."""
    offers = [(step, f"digest {step}", having) for step in steps]
    candidates.add_local(DISK, offers, RANKS, SPEC)
    return candidates


def test_the_newest_comes_first_and_for_one_step_the_shared_one() -> None:
    candidates = add(Candidates([shared(4), shared(2)]), 2, 4, 6)
    assert candidates.queue == [on_disk(6), shared(4), on_disk(4), shared(2), on_disk(2)]
    assert candidates.newest_step == 6
    assert candidates.notes == []


def test_a_run_that_has_only_local_ones_resumes_from_them() -> None:
    assert Candidates().newest_step == -1
    assert add(Candidates(), 2).queue == [on_disk(2)]


def test_what_is_not_whole_is_passed_over_with_a_note() -> None:
    candidates = add(Candidates([shared(4)]), 4, 6, having=3)
    assert candidates.queue == [shared(4)]
    assert candidates.notes == [
        "step 6 is on the local disks of 3 of 4 ranks, not whole: passed over"
    ]


def test_a_run_that_branched_off_another_resumes_from_its_own() -> None:
    other = Candidates([shared(16, Path("/other"))], older=False)
    assert add(other, 18, having=3).queue == [shared(16, Path("/other"))]
    assert other.notes == [], "nothing of this run is whole: it begins with the other one"
    add(other, 18)
    assert (other.queue, other.older) == ([on_disk(18)], True)
    assert [note.partition(",")[0] for note in other.notes] == ["checkpoint.resume names /other"]


@pytest.mark.parametrize("having", [3, 4])
def test_who_goes_back_gets_the_checkpoint_that_was_named(having: int) -> None:
    back = Candidates([shared(2)], older=False, back=True)
    assert add(back, 4, having=having).queue == [shared(2)]
    assert back.notes == []
