"""The mesh against the layout it was made from: real groups on 8 and on 4 + 2 processes, and 4,096 ranks in one."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshtrain.layout import Layout, LayoutError
from meshtrain.mesh import COMBINED, build_mesh
from tests.launching import forked, two_hosts

SCRIPT = Path(__file__).parent / "gather_groups.py"
EIGHT = [
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"tp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "dp_replicate": 4},
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    {"dp_shard": 8},
    {"dp_shard": 1, "pp": 8},
]
SIX = [{"pp": 3, "dp_shard": 2}, {"dp_replicate": 3, "tp": 2}, {"dp_shard": 6}]


def check_gathered(printed: str, layouts: list[dict[str, int]]) -> None:
    """What every rank gathered over every group is what the layout says, and all ranks made the same groups."""
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    world = Layout(layouts[0]).world_size
    assert len(found) == world * len(layouts)
    for row in found:
        layout = Layout(layouts[row["layout"]])
        for axes, ranks in row["groups"]:
            assert ranks == layout.group(row["rank"], *axes), (layout, row["rank"], axes)
        assert {tuple(axes) for axes, _ in row["groups"]} == {
            axes for axes in [(axis,) for axis in layout.axes] + list(COMBINED) if layout.size(*axes) > 1
        }
        distinct = {tuple(ranks) for _, ranks in row["groups"]} | {tuple(range(world))}
        assert row["created"] == len(distinct), "one group per distinct set of ranks"


def test_eight_processes_gather_what_the_layout_says() -> None:
    done = forked(8, SCRIPT, json.dumps(EIGHT)).check()
    check_gathered(done.out, EIGHT)


def test_four_and_two_processes_under_two_agents() -> None:
    first, second = two_hosts((4, 2), str(SCRIPT), json.dumps(SIX))
    check_gathered(first.check().out + second.check().out, SIX)


@pytest.fixture
def fake_world() -> object:
    """4,096 ranks, of which this process is one; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=2049, world_size=4096)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_world")
def test_the_mesh_of_4096_ranks_in_one_process() -> None:
    layout = Layout({"pp": 8, "dp_replicate": 4, "dp_shard": 16, "tp": 8})
    mesh = build_mesh(layout, "cpu")
    for axes in [(axis,) for axis in layout.axes] + list(COMBINED):
        group = mesh.group(*axes)
        assert group is not None
        assert dist.get_process_group_ranks(group) == layout.group(2049, *axes)
    assert mesh.world is dist.group.WORLD
    submesh = mesh.submesh("dp_replicate", "dp_shard")
    assert submesh is not None
    assert submesh.mesh_dim_names == ("dp_replicate", "dp_shard")
    assert submesh.mesh.flatten().tolist() == layout.group(2049, "dp_replicate", "dp_shard")
    assert mesh.group("cp") is None, "an axis of size 1 has no group"
    assert (mesh.size("dp_shard"), mesh.index("dp_shard")) == (16, layout.coordinate(2049)["dp_shard"])


@pytest.mark.usefixtures("fake_world")
def test_what_torch_accepts_silently_is_an_error() -> None:
    with pytest.raises(LayoutError, match="2048 ranks and the job has 4096"):
        build_mesh(Layout({"dp_shard": 2048}), "cpu")
    mesh = build_mesh(Layout({"pp": 2, "dp_shard": 1024, "tp": 2}), "cpu")
    with pytest.raises(LayoutError, match="dp"):
        mesh.group("dp")
    with pytest.raises(LayoutError):
        mesh.submesh("dp_shard", "expert")
    with pytest.raises(LayoutError, match="no group was made over pp x tp"):
        mesh.group("pp", "tp")


def test_a_world_of_one_has_no_groups() -> None:
    mesh = build_mesh(Layout({"dp_shard": 1, "tp": 1}))
    assert mesh.world is None
    assert mesh.group("tp") is None
    assert mesh.submesh("dp_shard") is None
    with pytest.raises(LayoutError):
        build_mesh(Layout({"dp_shard": 2}))
