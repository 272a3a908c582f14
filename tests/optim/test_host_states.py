"""Optimizer states on the host: the same bits, some of them on the device at a time, and
checkpoints that both ways go on from."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshtrain.config import Config
from meshtrain.errors import AgreedError
from meshtrain.job import host_limits
from meshtrain.job.process import Job
from meshtrain.modeling.build import build_model
from meshtrain.optim import host_states
from meshtrain.optim.host_states import OnHost
from meshtrain.optim.optimizer import Optimizer, state_bytes
from meshtrain.optim.registry import OPTIMIZERS
from meshtrain.parallel import host_link
from meshtrain.parallel.host_link import HostLink
from meshtrain.parallel.parallelize import parallelize
from meshtrain.run.setup import require_host_memory
from tests.comparing import ALONE, CPU
from tests.optim.steps import config, set_gradients, update
from tests.parallel.late_copies import Late
from tests.parity.experiments import QUICKSTART, SMALL
from tests.test_training import shared, train

__all__ = ["shared"]  # a fixture

SMALL_BUCKET = 6000  # bytes: some parameters of the model below, and less than the largest


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    copier = Late()
    monkeypatch.setattr(host_link, "copier_of", lambda device: copier)
    monkeypatch.setattr(host_states, "BUCKET", SMALL_BUCKET)
    monkeypatch.setitem(OPTIMIZERS, "normalized", "tests.optim.toy_optimizer:NormalizedMomentum")
    return copier


def layers() -> nn.Module:
    torch.manual_seed(0)
    sizes = [(16, 8), (8, 8), (8, 40), (40, 40), (40, 4)]
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes), nn.LayerNorm(4))
    # one that does not lie in memory as it is numbered
    model[3].weight = nn.Parameter(model[3].weight.detach().mT.contiguous().mT)
    return model


def trained(offload: str, link: HostLink, **settings: Any) -> tuple[nn.Module, Optimizer]:
    """A model after four updates, of which the third was skipped."""
    model = parallelize(layers(), ALONE, offload=offload, host_link=link)
    optimizer = Optimizer(model, config(**settings), ALONE, 10)
    for step in range(1, 5):
        set_gradients(model, step)
        update(optimizer, step, torch.tensor(0.5, dtype=torch.float64), skip=step == 3)
    return model, optimizer


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, averaged": {"ema_decay": 0.9},
    "bfloat16": {"state_precision": "bfloat16", "ema_decay": 0.9},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd", "ema_decay": 0.9},
    "of a user": {"name": "normalized"},
}


@pytest.mark.parametrize("name", CASES)
def test_late_copies_change_no_bit(name: str, late: Late) -> None:
    models, optimizers = zip(
        *(trained(offload, HostLink(), **CASES[name]) for offload in ("none", "optimizer")),
        strict=True,
    )
    for own, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(own, other)
        states = [optimizer.state(p) for optimizer, p in zip(optimizers, (own, other), strict=True)]
        assert states[0].keys() == states[1].keys()
        for kind, (spec, value) in states[0].items():
            other_spec, other_value = states[1][kind]
            assert spec == other_spec
            assert torch.equal(value, other_value), kind
            assert value.stride() == other_value.stride()
    assert optimizers[0].updates == optimizers[1].updates == 3
    if CASES[name].get("ema_decay"):
        for optimizer, model in zip(optimizers, models, strict=True):
            with optimizer.averaged(model):
                averages = [p.detach().clone() for p in model.parameters()]
            assert not any(map(torch.equal, averages, model.parameters()))
    assert {kind for kind, _ in late.log} == {"in", "out", "wait"}


def test_states_come_and_go_within_the_limit(late: Late) -> None:
    """While the first parameters are updated the next ones come; what has been updated leaves. The
    states of one parameter may be more than the limit."""
    link = HostLink(limit=2 * SMALL_BUCKET)
    model = parallelize(layers(), ALONE, offload="optimizer", host_link=link)
    optimizer = Optimizer(model, config(), ALONE, 10)
    home = optimizer.rules["adamw"].home
    assert isinstance(home, OnHost)
    sizes = [bucket.nbytes for bucket in home._buckets]
    assert sizes == [5120, 13312, 5120, 4096]
    assert link.host_bytes == sum(sizes)
    homes = {p: dict(p.state) for p in optimizer._parameters}

    late.log.clear()
    visited = []
    for parameters in home.visit():
        visited += parameters
        away = {p for p, own in homes.items() if p.state["exp_avg"] is not own["exp_avg"]}
        assert away == set(parameters)
    assert visited == [p for group in optimizer.param_groups for p in group.parameters]
    # The numbers are those of the copies. The second bucket is larger than the limit: nothing comes
    # with it, and it leaves alone. The last two are within it.
    assert late.log == [
        *[("in", 0), ("wait", 0), ("out", 1)],
        *[("in", 2), ("wait", 2), ("out", 3), ("wait", 1)],
        *[("in", 4), ("in", 5), ("wait", 4), ("out", 6), ("wait", 3)],
        *[("wait", 5), ("out", 7)],
        *[("wait", 6), ("wait", 7)],
    ]
    assert all(p.state[kind] is value for p, own in homes.items() for kind, value in own.items())


def test_an_update_that_fails_leaves_the_states_at_home(late: Late) -> None:
    model = parallelize(layers(), ALONE, offload="optimizer", host_link=HostLink())
    optimizer = Optimizer(model, config(), ALONE, 10)
    homes = {p: dict(p.state) for p in optimizer._parameters}
    visits = optimizer.rules["adamw"].home.visit()
    next(visits)
    with pytest.raises(ZeroDivisionError):
        visits.throw(ZeroDivisionError)  # type: ignore[attr-defined]
    assert all(p.state[kind] is value for p, own in homes.items() for kind, value in own.items())
    started = {number for kind, number in late.log if kind != "wait"}
    assert started == {number for kind, number in late.log if kind == "wait"}


def test_a_host_without_room_for_its_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("optimizer.ema_decay=0.9", "optimizer.state_precision=bfloat16")
    loaded = Config.load(QUICKSTART, [*SMALL, *keys, "parallel.offload=both"], world_size=1)
    model = build_model(loaded, ALONE, CPU)
    weights = sum(p.numel() for p in model.parameters())
    needed = state_bytes(model, loaded.optimizer, ALONE)
    assert needed == weights * (2 + 2 + 4)
    monkeypatch.setattr(host_limits, "memory_gib", lambda: (0.0, 2 * needed / 2**30))
    require_host_memory(loaded, model, ALONE, _TwoRanks())
    monkeypatch.setattr(host_limits, "memory_gib", lambda: (0.0, (2 * needed - 1024) / 2**30))
    with pytest.raises(AgreedError, match="both keeps optimizer states in the"):
        require_host_memory(loaded, model, ALONE, _TwoRanks())
    activations = replace(loaded, parallel=replace(loaded.parallel, offload="activations"))
    require_host_memory(activations, model, ALONE, _TwoRanks())


class _TwoRanks(Job):
    """A job of two ranks of one host, with the same reports."""

    host = "a"

    def __init__(self) -> None:
        pass

    def reduce(self, activity: str, value: Any, combine: Callable[[list], Any]) -> Any:
        return combine([value, value])


def test_checkpoints_are_the_same_with_and_without(shared: Path, tmp_path: Path) -> None:
    """Each goes on from the other's, to the bit."""
    keys = ("optimizer.ema_decay=0.9", "optimizer.schedule=constant", "checkpoint.every=2")
    whole = train(shared, tmp_path / "whole", *keys, "train.steps=6")
    for steps, offload in ((2, "both"), (4, "none"), (6, "both")):
        own = (f"train.steps={steps}", f"parallel.offload={offload}")
        rows = train(shared, tmp_path / "mixed", *keys, *own)
    for row, expected in zip(rows, whole, strict=True):
        assert (row["loss"], row["grad_norm"]) == (expected["loss"], expected["grad_norm"])
