"""Batch norm over all data ranks against batch norm of one process; whole runs are in
tests/parity."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshtrain
from meshtrain.errors import AgreedError, InputError
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.parallel.grad_sync import set_is_last_backward
from tests.comparing import gradients, same, same_gradients

pytestmark = [pytest.mark.ranks(2, 4), pytest.mark.usefixtures("float64")]


class Normed(nn.Sequential):
    def __init__(self, **options: Any) -> None:
        super().__init__(
            nn.Conv1d(3, 4, 2),
            nn.BatchNorm1d(4, **options),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(16, 2),
        )


class WithActivation(nn.BatchNorm1d):
    """As in timm."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class InBlock(nn.Module):
    """Its normed layers are a block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Normed()

    def blocks(self) -> list[nn.Module]:
        return [self.inner]

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def samples(step: int, ranks: int) -> Tensor:
    """Three of each rank, of which the ranks have different means."""
    draws = torch.Generator().manual_seed(step)
    return torch.randn(ranks, 3, 3, 5, generator=draws) + torch.arange(ranks)[:, None, None, None]


@pytest.mark.parametrize(
    "layout", [{"dp_replicate": -1}, {"dp_shard": -1}, {"dp_replicate": 2, "dp_shard": -1}]
)
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False, "momentum": 0.3, "eps": 0.1}]
)
def test_statistics_are_those_of_all_samples(
    job: Job, layout: dict[str, int], options: dict[str, Any]
) -> None:
    ranks = job.world_size
    mesh = build_mesh(Layout.resolve(layout, ranks))
    torch.manual_seed(0)
    plain = Normed(**options)
    torch.manual_seed(0)
    model = meshtrain.parallelize(
        Normed(**options), mesh, precision="float64", sync_batch_norm=True
    )
    for step in range(3):
        x = samples(step, ranks)
        set_is_last_backward(model, True)
        model.zero_grad()
        plain.zero_grad()
        actual, expected = model(x[job.rank]), plain(x.flatten(0, 1))
        same(actual, expected.unflatten(0, (ranks, 3))[job.rank])
        actual.square().sum().backward()
        expected.square().sum().backward()
        same_gradients(model, gradients(plain))
    for name, buffer in plain.named_buffers():
        same(model.get_buffer(name), buffer, name)
    same(model.eval()(x[0]), plain.eval()(x[0]))


@pytest.mark.ranks(2)
def test_what_it_cannot_keep_is_refused(job: Job) -> None:
    mesh = build_mesh(Layout({"dp_replicate": 2}))
    with pytest.raises(AgreedError, match="1 keeps no running statistics"):
        meshtrain.parallelize(Normed(track_running_stats=False), mesh, sync_batch_norm=True)
    with pytest.raises(
        AgreedError, match="1 is a batch norm, to which cp gives parts of the samples"
    ):
        meshtrain.parallelize(Normed(), build_mesh(Layout({"cp": 2})), sync_batch_norm=True)
    own_forward = nn.Sequential(nn.Conv1d(3, 4, 2), WithActivation(4))
    with pytest.raises(
        AgreedError, match="1 is a WithActivation, which does more than torch's batch norm"
    ):
        meshtrain.parallelize(own_forward, mesh, sync_batch_norm=True)
    with pytest.raises(AgreedError, match="Use a GroupNorm or LayerNorm, freeze it"):
        meshtrain.parallelize(own_forward, mesh)
    model = meshtrain.parallelize(
        InBlock(), mesh, precision="float64", sync_batch_norm=True, recompute="full"
    )
    with pytest.raises(
        InputError, match=r"the model's forward changes inner\.1\.running_mean in training"
    ):
        model(samples(0, 2)[job.rank])
