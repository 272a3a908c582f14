"""Fixtures of tests that compare in float64."""

from collections.abc import Iterator

import pytest
import torch

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors are of this type."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def tp(job: Job) -> Mesh:
    """All ranks of the job on the axis `tp`."""
    return build_mesh(Layout({"tp": job.world_size}))
