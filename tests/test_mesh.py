"""The mesh against the layout it was made from: real groups on 8 and on 6 processes, and 4,096
ranks in one."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshtrain.job.process import Job
from meshtrain.layout import AXES, CONTEXT_AXES, EXPERT_AXES, VIEWS, Layout, LayoutError
from meshtrain.mesh import Mesh, _splits, build_mesh, rounds

ON_RANKS = [
    (8, Layout({"pp": 2, "dp_shard": 2, "tp": 2})),
    (8, Layout({"tp": 2, "dp_replicate": 2, "dp_shard": 2})),
    (8, Layout({"dp_shard": 2, "dp_replicate": 4})),
    (8, Layout({"dp_replicate": 2, "dp_shard": 2, "cp": 2})),
    (8, Layout({"dp_shard": 8})),
    (8, Layout({"dp_shard": 1, "pp": 8})),
    (8, Layout({"dp_replicate": 2, "dp_shard": 2, "tp": 2}).with_experts(2)),
    (8, Layout({"tp": 2, "dp_replicate": 2, "cp": 2}).with_experts(8)),
    (8, Layout({"dp_replicate": 2, "pp": 2, "dp_shard": 2}).with_experts(2)),
    (6, Layout({"pp": 3, "dp_shard": 2})),
]


def axes_with_groups(layout: Layout) -> list[tuple[str, ...]]:
    single = [(axis,) for axis in (*AXES, *VIEWS, *CONTEXT_AXES)]
    of_experts = [("cp", "tp"), *((axis,) for axis in EXPERT_AXES)] if layout.experts > 1 else []
    return single + list(VIEWS.values()) + of_experts


def check_groups(mesh: Mesh, own_axes: set[str]) -> None:
    """One group for each set of ranks, which are those that the layout says. `own_axes` share
    theirs with no axis."""
    shared = {tuple(range(mesh.layout.world_size)): mesh.world}
    for axes in axes_with_groups(mesh.layout):
        ranks = mesh.layout.group(mesh.rank, *axes)
        group = mesh.group(*axes)
        assert (mesh.size(*axes), mesh.index(*axes)) == (len(ranks), ranks.index(mesh.rank))
        assert (group is None) == (len(ranks) == 1), "a rank alone has no group"
        if group is None:
            continue
        assert dist.get_process_group_ranks(group) == ranks
        if axes[0] not in own_axes:
            assert shared.setdefault(tuple(ranks), group) is group
    assert mesh._groups == shared, "no group is made in vain"
    assert mesh._own.keys() == own_axes
    groups = [*mesh._groups.values(), *mesh._own.values(), *mesh._links.values()]
    assert len(set(groups)) == len(groups)


@pytest.mark.parametrize(
    ("job", "layout"),
    [pytest.param(world, layout, id=f"{world}-ranks-{layout}") for world, layout in ON_RANKS],
    indirect=["job"],
)
def test_ranks_meet_in_groups_as_the_layout_says(
    job: Job, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours in a pipeline, too, who have the groups that they have on NCCL."""
    monkeypatch.setattr("meshtrain.mesh.IN_TURN", ("cpu",))
    mesh = build_mesh(layout)
    check_groups(mesh, {"ep"} if layout.experts > 1 else set())

    def gathered(group: dist.ProcessGroup) -> list[int]:
        ranks = [-1] * dist.get_world_size(group)
        dist.all_gather_object(ranks, job.rank, group=group)
        return ranks

    for axes in axes_with_groups(layout):
        group = mesh.group(*axes)
        assert group is None or gathered(group) == layout.group(job.rank, *axes)
    for dim in layout.expert_mesh_dims:
        submesh = mesh.submesh(dim)
        assert submesh is None or submesh.get_group() is mesh.group(dim)
    column = layout.group(job.rank, "pp")
    place = column.index(job.rank)
    neighbours = {column[(place + 1) % len(column)], column[place - 1]} - {job.rank}
    ends = {(job.rank, other) for other in neighbours} | {(other, job.rank) for other in neighbours}
    assert {link: gathered(group) for link, group in mesh._links.items()} == {
        link: sorted(link) for link in ends
    }


def test_neighbours_are_paired_in_two_or_three_rounds() -> None:
    for ranks in range(1, 18):
        made = rounds(ranks)
        assert len(made) == {1: 0, 2: 1}.get(ranks, 3 if ranks % 2 else 2)
        assert all(
            sorted(rank for pair in pairs for rank in pair) == list(range(ranks)) for pairs in made
        )
        pairs = [frozenset(pair) for some in made for pair in some if len(pair) == 2]
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == {frozenset({i, (i + 1) % ranks}) for i in range(ranks)} - {
            frozenset({0})
        }


ME = 2049
ORDERS = [
    Layout({"dp_replicate": 4, "dp_shard": 64, "cp": 2, "tp": 8}),
    Layout({"cp": 2, "tp": 8, "dp_shard": 64, "dp_replicate": 4}),
]


@pytest.fixture
def _fake_world() -> Iterator[None]:
    """4,096 ranks, of which this process is one; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=ME, world_size=4096)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_fake_world")
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("layout", "ep", "own_on_cpu"),
    [
        (Layout({"pp": 8, "dp_replicate": 4, "dp_shard": 16, "tp": 8}), 1, set()),
        *((layout, 32, set()) for layout in ORDERS),
        *(
            (Layout({"dp_shard": 512, "cp": 4, "tp": 2}).with_context_heads(heads), 1, set())
            for heads in (1, 2, 4)
        ),
        (Layout({"dp_replicate": 64, "tp": 64}), 64, {"edp_replicate"}),
        (Layout({"dp_shard": 512, "tp": 8}), 4096, set()),
        (Layout({"dp_replicate": 16, "dp_shard": 256}), 256, set()),
        (Layout({"pp": 2, "dp_replicate": 2048}), 1024, {"edp_replicate"}),
    ],
    ids=str,
)
def test_groups_of_4096_ranks(
    layout: Layout, ep: int, own_on_cpu: set[str], device_type: str
) -> None:
    """Messages to experts and their reducer share no group: two orders over one group deadlock on
    NCCL where ranks do not agree on which is first."""
    own_axes = own_on_cpu | ({"ep"} if device_type == "cuda" and ep > 1 else set())
    check_groups(build_mesh(layout.with_experts(ep), device_type), own_axes)


@pytest.mark.usefixtures("_fake_world")
@pytest.mark.parametrize("layout", ORDERS, ids=str)
def test_fsdp_and_experts_have_dims_of_their_own(layout: Layout) -> None:
    """FSDP one over dp_shard and cp, and experts a second mesh over the same ranks."""
    mesh = build_mesh(layout.with_experts(32), "cpu")
    for axes, shape in (
        (("dp_replicate", "fsdp"), (4, 128)),
        (("edp_replicate", "efsdp"), (4, 32)),
        (("ep",), (32,)),
    ):
        submesh = mesh.submesh(*axes)
        assert (submesh.mesh_dim_names, tuple(submesh.mesh.shape)) == (axes, shape)
        assert sorted(submesh.mesh.flatten().tolist()) == mesh.layout.group(ME, *axes)
        assert tuple(submesh.get_coordinate()) == tuple(mesh.index(axis) for axis in axes)
        assert submesh[axes[-1]].mesh.tolist() == mesh.layout.group(ME, axes[-1])
        assert submesh[axes[-1]].get_group() is mesh.group(axes[-1])
    assert mesh.uses_fsdp
    with pytest.raises(LayoutError, match="the mesh has the dims dp_replicate, fsdp, tp"):
        mesh.submesh("dp_shard")
    for mixed in [("edp_replicate", "fsdp"), ("dp_replicate", "ep")]:
        with pytest.raises(LayoutError, match="axes of experts and other axes have no common mesh"):
            mesh.submesh(*mixed)


@pytest.mark.usefixtures("_fake_world")
def test_experts_on_one_rank_each_lie_as_the_other_parameters_do() -> None:
    layout = Layout({"dp_replicate": 16, "dp_shard": 256})
    mesh = build_mesh(layout, "cpu")
    assert (mesh.expert_mesh, layout.expert_mesh_dims, mesh.submesh("ep")) == (None, (), None)
    assert mesh.submesh("edp_replicate", "efsdp") == mesh.submesh("dp_replicate", "dp_shard")


@pytest.mark.usefixtures("_fake_world")
def test_groups_are_split_off_the_world_at_once_where_the_backend_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call for all groups over some axes, which says all of them, and no group made by
    itself."""
    layout = Layout({"pp": 8, "dp_replicate": 4, "dp_shard": 16, "tp": 8})
    split: list[list[list[int]]] = []
    single: list[list[int]] = []
    new_group = dist.new_group

    def split_group(split_ranks: list[list[int]], **_: object) -> object:
        split.append(split_ranks)
        return new_group(next(ranks for ranks in split_ranks if ME in ranks))

    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **_: single.append(ranks) or new_group(ranks)
    )
    build_mesh(layout, "cpu")
    assert (len(split), len(single)) == (0, 64), "not here: one by one"
    single.clear()
    monkeypatch.setattr("meshtrain.mesh._splits", lambda world: world is dist.group.WORLD)
    monkeypatch.setattr("meshtrain.mesh._options", lambda name: None)
    mesh = build_mesh(layout, "cpu")
    assert (split, single) == ([layout.groups("dp_replicate", "dp_shard")], [])
    group = mesh.group("dp_replicate", "dp_shard")
    assert dist.get_process_group_ranks(group) == layout.group(ME, "dp_replicate", "dp_shard")


def test_only_a_world_that_nccl_has_connected_is_split() -> None:
    cases = [
        ("cuda:1", True, True),
        ("cuda:1", False, False),
        ("cpu", True, False),
        (None, True, False),
    ]
    for device, able, expected in cases:
        backend = SimpleNamespace(supports_splitting=able)
        bound = None if device is None else torch.device(device)
        world = SimpleNamespace(
            bound_device_id=bound, _get_backend=lambda device, backend=backend: backend
        )
        assert _splits(world) == expected
    assert not _splits(SimpleNamespace())


@pytest.mark.parametrize("able", [True, False])
def test_messages_that_computing_waits_for_have_streams_of_high_priority(
    able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the backend has such, each group by a copy of the world's options; the world itself
    keeps its own."""
    options = SimpleNamespace(_timeout=7, **({"is_high_priority_stream": False} if able else {}))
    backend = SimpleNamespace(supports_splitting=True, options=options)
    world = SimpleNamespace(
        bound_device_id=torch.device("cuda:1"), _get_backend=lambda device: backend
    )
    options_of: dict[str, object] = {}

    def device_mesh(*_: object, mesh_dim_names: tuple[str, ...], backend_override: tuple) -> object:
        options_of.update(
            (name, option)
            for name, (_, option) in zip(mesh_dim_names, backend_override, strict=True)
        )
        return SimpleNamespace(get_group=lambda dim: object())

    def split_group(split_ranks: object, pg_options: object, group_desc: str) -> object:
        options_of[group_desc] = pg_options
        return object()

    job = {"is_initialized": lambda: True, "get_world_size": lambda: 8, "get_rank": lambda: 5}
    fake = SimpleNamespace(group=SimpleNamespace(WORLD=world), split_group=split_group, **job)
    monkeypatch.setattr("meshtrain.mesh.DeviceMesh", device_mesh)
    monkeypatch.setattr("meshtrain.mesh.dist", fake)
    build_mesh(Layout({"pp": 2, "dp_replicate": 2, "tp": 2}), "cuda")
    build_mesh(Layout({"dp_shard": 2, "cp": 4}).with_context_heads(2), "cuda")
    urgent = dict.fromkeys(("tp", "pp_link", "cp", "cp_heads", "cp_ring"))
    if able:
        urgent = dict.fromkeys(urgent, SimpleNamespace(_timeout=7, is_high_priority_stream=True))
    assert options_of == dict.fromkeys(("pp", "dp_replicate", "fsdp", "dp_shard")) | urgent
    assert not getattr(options, "is_high_priority_stream", False), "the groups have copies"
    options_of.clear()
    build_mesh(Layout({"tp": 8}), "cuda")
    assert options_of == {"tp": None}, "the group of the world"


@pytest.mark.usefixtures("_fake_world")
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
    assert (mesh.world, mesh.group("tp"), mesh.submesh("dp_shard")) == (None, None, None)
    with pytest.raises(LayoutError):
        build_mesh(Layout({"dp_shard": 2}))
