"""Fixtures of tests that compare in float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.parallel import ddp, fsdp
from meshtrain.parallel.linear.matmul import PLAIN, PRODUCTS


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors are of this type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is a unit of FSDP, and DDP has several buckets."""
    monkeypatch.setattr(fsdp, "MIN_UNIT_SIZE", 0)
    monkeypatch.setattr(ddp, "BUCKET_BYTES", 200)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """The compiler has seen nothing, and counts from zero."""
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def tp(job: Job) -> Mesh:
    """All ranks of the job on the axis `tp`."""
    return build_mesh(Layout({"tp": job.world_size}))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an entry for each product in the forward of linear layers that are split from now on."""
    calls: list[int] = []

    def forward(*inputs: Any) -> Tensor:
        calls.append(1)
        return PLAIN.forward(*inputs)

    monkeypatch.setitem(PRODUCTS, PLAIN.name, replace(PLAIN, forward=forward))
    return calls
