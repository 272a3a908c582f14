"""Symmetric memory: where it is refused, chosen, and what it computes on GPUs."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from meshtrain.parallel import collectives
from meshtrain.parallel.collectives import Endpoint, symmetric_memory_problem
from tests.launching import forked, torchrun
from tests.parity.experiments import QUICKSTART

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count()


def test_symmetric_memory_is_refused_on_cpus_before_anything_starts(tmp_path: Path) -> None:
    keys = ("layout={tp: 2}", "parallel.symmetric_memory=true", f"train.output={tmp_path / 'run'}")
    done = forked(2, "-m", "meshtrain.train", QUICKSTART, *keys)
    assert done.err.count("parallel.symmetric_memory needs GPUs") == 1, done.err
    assert "command line: parallel.symmetric_memory=true: " in done.err
    assert done.status == 2
    assert not (tmp_path / "run").exists()


def linked(host: str, gpu: str, *others: str) -> Endpoint:
    return Endpoint(host, gpu, frozenset(others))


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        (
            [linked("n1", "a", "b", "c"), linked("n1", "b", "a", "c"), linked("n1", "c", "a", "b")],
            None,
        ),
        ([linked("n1", "a", "b"), linked("n2", "b", "a")], "several hosts"),
        (
            [linked("n1", "a", "b"), linked("n1", "b", "a", "c"), linked("n1", "c", "b")],
            "a and c of n1 have no NVLink",
        ),
        (
            [linked("n1", "a"), linked("n1", "b")],
            "a and b of n1",
        ),  # each process sees its own GPU only
    ],
)
def test_symmetric_memory_is_for_gpus_of_one_host_with_nvlink(
    ranks: list[Endpoint], problem: str | None
) -> None:
    found = symmetric_memory_problem(ranks)
    assert found is None if problem is None else problem in found


@pytest.mark.parametrize(
    ("others", "refusals", "halves", "choice"),
    [
        (linked("n1", "b", "a"), [None, None], [False, True], "on"),
        (linked("n2", "b"), [], [], "off: the ranks of tp are on several hosts"),
        (linked("n1", "b", "a"), ["no handles"], [False], "off: no handles"),
        (
            linked("n1", "b", "a"),
            [None, "pidfd_getfd: not permitted"],
            [False, True],
            "off: pidfd_getfd: not permitted",
        ),
    ],
)
def test_auto_takes_symmetric_memory_where_all_ranks_can(
    others: Endpoint,
    refusals: list[str | None],
    halves: list[bool],
    choice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank's refusal, of another than this one, is all ranks'; none waits for one that has
    refused by itself."""
    tried: list[bool] = []

    def gather(objects: list, own: object, group: object) -> None:
        objects[:] = [own, others if isinstance(own, Endpoint) else refusals[len(tried) - 1]]

    monkeypatch.setattr(collectives.dist, "all_gather_object", gather)
    monkeypatch.setattr(collectives.socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(collectives, "nvlink_neighbours", lambda device: ("a", frozenset("b")))
    monkeypatch.setattr(
        collectives, "try_symmetric_memory", lambda group, together: tried.append(together)
    )
    group = SimpleNamespace(size=2, group=None, fused=False, choice="")
    collectives.AxisGroup.fuse_if_possible(group, torch.device("cuda"))
    assert (group.fused, group.choice, tried) == (choice == "on", choice, halves)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs that reach each other's memory")
def test_symmetric_memory_computes_the_same() -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
    torchrun(
        2, str(HERE / "symmetric_memory_cases.py"), env={"CUDA_VISIBLE_DEVICES": visible}
    ).check()
