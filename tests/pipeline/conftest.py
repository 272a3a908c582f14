"""Fixtures of tests that run pipelines."""

import pytest

from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from tests.parallel.conftest import small_units

__all__ = ["small_units"]


@pytest.fixture
def pp(job: Job) -> Mesh:
    """All ranks of the job on the axis `pp`."""
    return build_mesh(Layout({"pp": job.world_size}))
