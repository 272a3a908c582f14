"""Saving: whole or not at all, beside the training, and told aloud when it goes wrong (more faults:
test_faults.py)."""

import os
import pkgutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import meshtrain
from meshtrain.checkpoint import commit, save
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.commit import CheckpointWrite
from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.placement import Placement
from meshtrain.checkpoint.replica_check import Sums, bit_sum, describe_divergence, find_divergence
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import checkpoint_bytes, write_shard
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.verify import verify
from meshtrain.config.schema import OptimizerSection
from meshtrain.errors import bytes_text
from meshtrain.job.environment import Environment
from meshtrain.job.process import Job
from meshtrain.layout import Layout
from meshtrain.mesh import build_mesh
from meshtrain.optim.optimizer import Optimizer
from tests.checkpoint.faults import SHARD
from tests.checkpoint.going_on import small_run
from tests.checkpoint.known import ABOUT, CPU, OF_4, alone, check_loaded, clear, fill, on, whole
from tests.checkpoint.known import save as save_once
from tests.launching import Finished, forked, side_by_side, wait_for

OfFour = Callable[..., tuple[State, Saver]]


@pytest.fixture(scope="module")
def filled() -> State:
    return on(alone(), {})


@pytest.fixture
def state(filled: State) -> State:
    fill(filled)
    return filled


@pytest.fixture
def printed() -> list[str]:
    return []


@pytest.fixture
def saver(state: State, tmp_path: Path, printed: list[str]) -> Iterator[Callable[..., Saver]]:
    """Makes one that writes to the test's folder."""
    savers: list[Saver] = []

    def make(
        job: Job | None = None, *, of: State = state, folder: Path = tmp_path, **options: Any
    ) -> Saver:
        savers.append(Saver(of, folder, job or alone(), say=printed.append, **options))
        return savers[-1]

    yield make
    for each in savers:
        each.close()


@pytest.fixture
def of_four(job: Job, saver: Callable[..., Saver], shared_path: Path) -> OfFour:
    """Makes a state of 4 ranks with known values, and what saves it to the folder of all."""

    def make(kind: str, **options: Any) -> tuple[State, Saver]:
        state = on(job, OF_4[kind], kind=kind)
        fill(state)
        return state, saver(job, of=state, **({"folder": shared_path} | options))

    return make


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A disk on which writing begins, and goes on when it is let go; `at_begin` is called in
    between."""
    disk = SimpleNamespace(begun=threading.Event(), go=threading.Event(), at_begin=lambda: None)

    def write(*arguments: Any) -> Any:
        disk.begun.set()
        disk.at_begin()
        assert disk.go.wait(60)
        return write_shard(*arguments)

    monkeypatch.setattr(commit, "write_shard", write)
    yield disk
    disk.go.set()


def time_is_over(one: Saver) -> None:
    assert one._current is not None
    one._current.limit_s = 0.0


def test_training_goes_on_while_its_state_is_written(
    saver: Callable[..., Saver],
    state: State,
    tmp_path: Path,
    printed: list[str],
    slow: SimpleNamespace,
) -> None:
    """The checkpoint has the state of its step, and other programs can read it."""
    one = saver()
    one.save(1, ABOUT)
    assert slow.begun.wait(60)
    one.poll()
    assert (one.saved, printed) == (None, [])
    clear(state)  # the training goes on
    slow.go.set()
    one.wait()
    assert (one.saved, one.problem, one.wants_stop) == (1, None, None)
    checkpoint = tmp_path / "step_0000001"
    assert sorted(os.listdir(checkpoint)) == ["COMPLETE", "manifest.json", SHARD]
    assert not verify(checkpoint)
    tensors = load_file(checkpoint / SHARD)
    assert tensors.keys() == state.placements.keys()
    for name, placement in state.placements.items():
        assert torch.equal(tensors[name], whole(name, placement)), name
    written = (checkpoint / SHARD).stat().st_size
    (line,) = printed
    assert line.startswith(f"checkpoint step_0000001: {bytes_text(written)} in ")
    assert "training waited" in line
    assert written <= checkpoint_bytes(state.placements, 1) <= 1.2 * written


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_is_given_up_and_none_begun_until_it_ends(
    saver: Callable[..., Saver],
    tmp_path: Path,
    printed: list[str],
    slow: SimpleNamespace,
    in_background: bool,
) -> None:
    one = saver(in_background=in_background)
    slow.at_begin = lambda: time_is_over(one)
    one.save(1, ABOUT, wait=True)
    problem = (
        "it took longer than 0 s (checkpoint.timeout_s): rank 0 on host here has not finished it"
    )
    assert (one.saved, one.problem, one.wants_stop) == (None, problem, None)
    one.save(2, ABOUT)
    assert one.problem == "rank 0 still waits for the disk with that of step 1, which was given up"
    assert printed[-1].endswith("training goes on, and the checkpoints before it are there")
    slow.go.set()
    one._thread.join(60)
    assert os.listdir(tmp_path) == [], "nothing is left of it"
    slow.at_begin = lambda: None
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)


@pytest.mark.parametrize("given_up", [True, False])
def test_a_run_that_ends_does_not_wait_for_the_disk(
    saver: Callable[..., Saver],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow: SimpleNamespace,
    given_up: bool,
) -> None:
    monkeypatch.setattr(save, "CLOSING_S", 0.1)
    one = saver()
    if given_up:
        slow.at_begin = lambda: time_is_over(one)
    one.save(1, ABOUT, wait=given_up)
    assert slow.begun.wait(60)
    one.close()
    assert one._thread.is_alive()
    assert os.listdir(tmp_path) == [".step_0000001.tmp"]
    if given_up:
        assert str(one.problem).startswith("it took longer")


def test_a_slow_save_is_said_once(
    saver: Callable[..., Saver],
    monkeypatch: pytest.MonkeyPatch,
    printed: list[str],
    slow: SimpleNamespace,
) -> None:
    one = saver()
    one.last_save_s = 1e-9
    one.save(1, ABOUT)
    one.poll()
    assert not printed
    monkeypatch.setattr(save, "SLOW_LEAST_S", 0.0)
    one.poll()
    one.poll()
    (line,) = printed
    assert line.startswith("warning: the checkpoint of step 1 has been written for ")
    assert line.endswith("and the last one took 0 s: the file system is slow, or hangs")


# Two ranks, one of which is not there -------------------------------------------------------------


def of_two(rank: int, store: dist.Store | None) -> Job:
    return Job(Environment("none", rank, 2, rank, "here", None), CPU, store)


def write_of(job: Job, place: Path) -> CheckpointWrite:
    """A save whose time is over when it begins."""
    state: Any = SimpleNamespace(placements={}, layout=None)
    sums: Any = SimpleNamespace(
        digests=lambda: {}, inconsistent_ties=lambda: ["w"], of_kind=lambda _: {}, not_finite=list
    )
    snapshot: Any = SimpleNamespace(wait=lambda: 0.0)
    return CheckpointWrite(state, place, job, 1, ABOUT, snapshot, sums, limit_s=0.0)


def test_a_rank_that_is_stuck_when_ranks_have_diverged_is_given_up(
    saver: Callable[..., Saver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run ends for it: what it holds is not what it should hold."""
    monkeypatch.setattr(commit, "find_divergence", lambda *_: [])
    store = dist.HashStore()
    first, stuck = (write_of(of_two(rank, store), tmp_path) for rank in (0, 1))
    thread = threading.Thread(target=first.run, args=[None], daemon=True)
    thread.start()
    stuck._prepare_round.put([{}, [], None])
    assert stuck._prepare_round.receive()["apart"] == [[0, ["w"]]]
    wait_for(lambda: first._gathering is first._divergence_round)
    assert first.poll()
    assert stuck.poll()
    thread.join(60)
    assert first.done.is_set()
    assert first.outcome is not None
    assert stuck.outcome == first.outcome
    assert (first.outcome.given_up, first.outcome.diverged) == (True, True)
    assert str(first.outcome.problem).endswith(
        "rank 1 has not said what it holds; what must be equal on several ranks is not"
    )
    one = saver()
    one._conclude(first)
    assert one.diverged
    assert one.wants_stop == f"there is no checkpoint of step 1: {first.outcome.problem}"


def test_a_save_is_given_up_before_its_word_is_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that hears it must know what to leave; and it may end its wait while the main
    thread looks."""
    one = write_of(of_two(0, dist.HashStore()), tmp_path)
    known: list[bool] = []
    monkeypatch.setattr(one._commit_round, "broadcast", lambda _: known.append(one.given_up))
    seen = iter([one._prepare_round, None])
    monkeypatch.setattr(
        CheckpointWrite, "_gathering", property(lambda _: next(seen)), raising=False
    )
    assert one.poll()
    assert known == [True]
    assert one.outcome is not None
    assert str(one.outcome.problem).endswith("rank 0, 1 has not begun to write")


@pytest.mark.timeout(60)
def test_who_has_no_thread_gives_a_save_up_as_well(
    saver: Callable[..., Saver], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    one = saver(of_two(0, dist.HashStore()), limit_s=0.3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        one.save(1, ABOUT, wait=True)
    assert str(one.problem).startswith("it took longer than 0.3 s")
    assert str(one.problem).endswith("rank 1 has not begun to write")


# Copies that differ -------------------------------------------------------------------------------


def test_one_changed_bit_changes_the_sum() -> None:
    for tensor in (
        torch.randn(5, 3),
        torch.randn(7).double(),
        torch.randn(9).bfloat16(),
        torch.tensor([True, False]),
    ):
        total = bit_sum(tensor)
        for at in range(tensor.nbytes):
            data = tensor.clone().view(-1).view(torch.uint8)
            data[at] ^= 0x40
            assert bit_sum(data.view(tensor.dtype)) != total
    x = torch.arange(12.0)
    assert bit_sum(x[1:]) == bit_sum(x[1:].clone()), "also where memory begins anywhere"
    assert bit_sum(x.view(3, 4).t()) == bit_sum(x.view(3, 4).t().contiguous())


def test_the_majority_is_right_and_few_are_asked() -> None:
    """8 ranks hold all of `a`; of `b` each pair of `tp` holds a half."""
    layout = Layout({"dp_replicate": 8, "tp": 2})
    placements = {"a": Placement((4,), "F32"), "b": Placement((4,), "F32", (("tp", 0),))}
    digests = [{"0": "same", "1": f"half {rank % 2}"} for rank in range(16)]
    assert find_divergence(placements, layout, digests) == []
    for rank in (3, 5, 7, 9, 11, 13):
        digests[rank]["1"] = f"other {rank}"
    (divergence,) = find_divergence(placements, layout, digests)
    odd_ranks = tuple(range(1, 16, 2))
    assert (divergence.kind, divergence.group, divergence.odd) == (1, odd_ranks, odd_ranks)
    assert divergence.reporters == (1, 3, 5, 7), "nobody has a majority"
    digests[3]["1"] = digests[5]["1"] = digests[7]["1"] = "half 1"
    (divergence,) = find_divergence(placements, layout, digests)
    assert (divergence.odd, divergence.reporters) == ((9, 11, 13), (9, 11, 13, 1))
    sums = {rank: {"b": [rank], "c": [5]} for rank in (9, 11, 13, 1)}
    description = describe_divergence(divergence, sums, [f"rank {rank}" for rank in range(16)])
    assert (
        description
        == "rank 9 and rank 11 and rank 13 differ from the 5 other ranks that hold the same part, in b"
    )


def test_a_weight_in_two_stages_of_a_rank_and_one_of_another_is_equal() -> None:
    """As with a V shape a weight of the first, a middle and the last stage."""
    placement = Placement((4,), "F32", stages=(0, 1))
    weight = torch.randn(4)

    def of_rank(*values: torch.Tensor) -> Sums:
        shards = [
            SimpleNamespace(name="w", placement=placement, compared=True, local=value)
            for value in values
        ]
        state = SimpleNamespace(
            placements={"w": placement},
            layout=Layout({"pp": 2}),
            shards=shards,
            mesh=SimpleNamespace(device_type="cpu"),
        )
        return Sums(state)

    twice, once = of_rank(weight, weight.clone()), of_rank(weight)
    assert twice.digests() == once.digests() != of_rank(weight, weight + 1).digests()
    assert twice.of_kind(0) == once.of_kind(0)
    assert twice.inconsistent_ties() == []
    assert of_rank(weight, weight + 1).inconsistent_ties() == ["w"]


def test_nothing_is_summed_up_where_nobody_else_holds_the_same(state: State) -> None:
    sums = Sums(state)
    assert sums.digests() == {}
    assert sums.inconsistent_ties() == []


def test_weights_that_no_batch_has_used_are_named_at_a_save_if_they_are_not_finite(
    saver: Callable[..., Saver], state: State, printed: list[str]
) -> None:
    """No loss and no norm shows them; the optimizer's state and buffers are not looked at, nor is
    an infinite weight anything else."""
    one = saver()
    one.save(1, ABOUT, wait=True)
    assert not [line for line in printed if "finite" in line]
    weights = [
        shard for shard in state.shards if shard.name.startswith("model.") and shard.compared
    ]
    others = [
        shard
        for shard in state.shards
        if shard.name.startswith("optimizer.") and shard.local.numel() > 1
    ]
    weights[0].local.view(-1)[0] = torch.nan
    weights[1].local.view(-1)[-1] = -torch.inf
    others[0].local.view(-1)[0] = torch.inf
    one.save(2, ABOUT, wait=True)
    assert one.saved == 2
    (line,) = [line for line in printed if "finite" in line]
    named = ", ".join(sorted(shard.name for shard in weights[:2]))
    assert (
        "the weights of step 2 are not all finite, though their loss was: rank 0 on host here: "
        f"{named}. No" in line
    )


# Several ranks ------------------------------------------------------------------------------------


@pytest.mark.ranks(4)
def test_a_rank_that_has_put_its_value_goes_on_and_a_thread_waits_for_the_answer(job: Job) -> None:
    first, second, third = (job.round() for _ in range(3))
    answers: list[Any] = []

    def wait_for_answers() -> None:
        second.put(job.rank)
        if job.rank == 0:
            second.broadcast(sum(second.gather()))
        answers.append(second.receive())
        if job.rank == 0:
            with pytest.raises(CancelledError, match="waits no longer for ranks 0-3"):
                third.gather()
            answers.append("given up")

    thread = threading.Thread(target=wait_for_answers)
    thread.start()
    assert job.gather("meeting meanwhile", job.rank) == [0, 1, 2, 3]
    first.put(None)
    wait_for(lambda: bool(answers))
    third.cancel()
    thread.join(60)
    assert answers == ([6, "given up"] if job.rank == 0 else [6])
    job.gather("meeting once more", None)
    assert job.store is not None
    left = [job.store.check([f"{meeting.name}/given"]) for meeting in (first, second)]
    assert left == [True, False], "what was collected is cleared away"


@pytest.mark.ranks(4)
def test_all_ranks_go_on_while_the_disk_of_one_is_slow(
    job: Job, of_four: OfFour, shared_path: Path, printed: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With their collectives. A second save waits for the first, in which is what the snapshot
    had."""
    waits = job.round()

    def write_slowly(*arguments: Any) -> Any:
        waits.receive()
        return write_shard(*arguments)

    if job.rank == 1:
        monkeypatch.setattr(commit, "write_shard", write_slowly)
    state, one = of_four("HSDP")
    one.save(7, ABOUT)
    for _ in range(50):
        dist.all_reduce(torch.ones(100))
    job.gather("going on", None)
    one.poll()
    assert one.saved is None
    clear(state)
    if job.rank == 0:
        # it is called while one waits
        monkeypatch.setattr(Saver, "_warn_if_slow", lambda *_: waits.broadcast(None))
    one.save(8, ABOUT)
    assert one.saved == 7
    assert one.last_wait_s > 0
    one.wait()
    assert len([line for line in printed if "still being written" in line]) == (job.rank == 0)
    check_loaded(shared_path / name_of(7), state)


@pytest.mark.ranks(4)
def test_a_folder_that_vanishes_for_one_rank(job: Job, of_four: OfFour, shared_path: Path) -> None:
    """There is no checkpoint, the message says whose path it is, and the one before stays."""
    target, own = shared_path / "checkpoints", shared_path / f"way_of_rank_{job.rank}"
    target.mkdir(exist_ok=True)
    own.symlink_to(target)
    _, one = of_four("FSDP", folder=own)
    one.save(1, ABOUT, wait=True)
    assert one.problem is None
    if job.rank == 2:
        own.unlink()
    one.save(2, ABOUT, wait=True)
    unfinished = f"{shared_path}/way_of_rank_2/.step_0000002.tmp"
    assert str(one.problem).startswith(f"rank 2 on host {job.host} (dp_shard 2): {unfinished}")
    assert str(one.problem).endswith("No such file or directory")
    assert (one.saved, one.diverged, one.wants_stop) == (1, False, None)
    job.gather("looking", None)
    assert os.listdir(target) == ["step_0000001"]
    if job.rank == 2:
        own.symlink_to(target)
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("stuck", "function", "delay"),
    [
        (2, "write_shard", "rank 2 has not written its file"),
        (0, "write_shard", "rank 0 on host HOST (dp_shard 0) has not finished it"),
        (0, "directory.begin", "rank 0 on host HOST (dp_shard 0) has not finished it"),
    ],
)
def test_all_give_up_a_save_when_the_disk_of_one_hangs(
    job: Job, of_four: OfFour, shared_path: Path, monkeypatch: pytest.MonkeyPatch,
    stuck: int, function: str, delay: str,
) -> None:  # fmt: skip
    """With the same message; when it is back, saves work again."""
    function = f"meshtrain.checkpoint.commit.{function}"
    plain = pkgutil.resolve_name(function)
    begun, go = threading.Event(), threading.Event()

    def hang(*arguments: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return plain(*arguments)

    state, one = of_four("FSDP")
    if job.rank == stuck:
        monkeypatch.setattr(function, hang)
    one.save(1, ABOUT)
    write = one._current
    if job.rank == stuck:
        assert begun.wait(60)
    if job.rank == 0 and stuck != 0:
        wait_for(
            lambda: (
                write._gathering is write._commit_round and write._gathering.missing() == [stuck]
            )
        )
    job.gather("hanging", None)
    time_is_over(one)
    one.wait()
    problem = f"it took longer than 0 s (checkpoint.timeout_s): {delay.replace('HOST', job.host)}"
    assert (one.saved, one.problem) == (None, problem)
    if job.rank != stuck:
        one._thread.join(60)  # it gives up as well
    one.save(2, ABOUT)
    problem = f"rank {stuck} still waits for the disk with that of step 1, which was given up"
    assert (one.saved, one.problem, one.wants_stop) == (None, problem, None)
    go.set()
    one._thread.join(60)
    job.gather("coming back", None)
    one.save(3, ABOUT, wait=True)
    assert (one.saved, one.problem) == (3, None)
    job.gather("looking", None)
    assert folder.complete_steps(shared_path) == [3]
    check_loaded(shared_path / name_of(3), state)


AVERAGE = "optimizer.model.layers.3.mlp.up_proj.weight.exp_avg_sq"
TWO = (
    "rank 0 on host HOST (dp_replicate 0, dp_shard 0) and rank 2 on host HOST (dp_replicate 1, "
    "dp_shard 0)"
)
STAGES = "rank 0 on host HOST (pp 0) and rank 3 on host HOST (pp 3) differ from each other"


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("kind", "rank", "tensor", "says"),
    [
        ("DDP", 2, AVERAGE, "rank 2 on host HOST (dp_replicate 2) differs from the 3 other ranks"),
        ("HSDP", 2, "model.model.layers.0.mlp.up_proj.weight", f"{TWO} differ from each other"),
        (
            "tp",
            1,
            "model.model.norm.weight",
            "rank 1 on host HOST (tp 1) differs from the 3 other ranks",
        ),
        ("pp", 3, "model.model.embed_tokens.weight", STAGES),
        (
            "V",
            0,
            "model.model.embed_tokens.weight",
            "rank 0 on host HOST (pp 0) holds two different copies",
        ),
    ],
)
def test_copies_that_differ_in_a_bit_are_not_saved(
    job: Job, of_four: OfFour, shared_path: Path, kind: str, rank: int, tensor: str,
    says: str,
) -> None:  # fmt: skip
    """The rank and the tensor are named."""
    state, one = of_four(kind)
    one.save(1, ABOUT, wait=True)
    assert one.problem is None
    if job.rank == rank:
        held = next(held for held in state.shards if held.name == tensor)
        bits = held.local.detach().view(-1).view(torch.int32)
        bits[-1] ^= 1 << 20
    one.save(2, ABOUT, wait=True)
    assert one.diverged
    assert f"what must be equal on several ranks is not: {says.replace('HOST', job.host)}" in str(
        one.wants_stop
    )
    assert tensor in str(one.wants_stop)
    job.gather("looking", None)
    assert os.listdir(shared_path) == ["step_0000001"]


@pytest.mark.ranks(4)
def test_running_statistics_may_differ(job: Job, shared_path: Path) -> None:
    """They depend on a rank's own samples."""
    mesh = build_mesh(Layout({"dp_replicate": 4}))
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(5).eval()
    model = meshtrain.parallelize(nn.Sequential(nn.Linear(3, 5), norm), mesh, verify=False)
    norm.train()  # afterwards, since parallelize would refuse it
    state = State(model, Optimizer(model, OptimizerSection(), mesh, 1), mesh, job)
    model(torch.full((4, 3), float(job.rank)))
    means = job.gather("comparing", norm.running_mean.tolist())
    assert means[0] != means[1]
    save_once(state, job, shared_path)


# A whole job --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_disk_ends_no_job(tmp_path: Path) -> None:
    """Rank 1 takes several deadlines for its second file: in the background, and while all wait, in
    jobs side by side, which sleep for most of their time."""
    options = (
        "train.steps=8",
        "train.step_timeout_s=2",
        "checkpoint.every=2",
        "data.workers=0",
        "layout={dp_shard: 2}",
    )
    folders = [tmp_path / name for name in ("true", "false")]

    def train(place: Path) -> Finished:
        place.mkdir()
        in_background = f"checkpoint.in_background={place.name}"
        slow_save = ("-m", "tests.fault_in_save", "9", "1", "4")  # 9 s, rank 1, step 4
        return forked(2, *slow_save, small_run(place), *options, in_background)

    for place, job in zip(
        folders, side_by_side(*(partial(train, place) for place in folders)), strict=True
    ):
        job.check()
        assert folder.complete_steps(place / "run/checkpoints") == [4, 6, 8]
        assert "waiting for rank 1 on host" in job.err, (
            "a deadline has passed, and who is waited for was said"
        )
