"""A job of 4 ranks for tests: states on every layout of 4 ranks, joint saves, loading; prints what failed.

... -m tests.checkpoint.ranks FOLDER state | save | load | killed

`load` needs a checkpoint of one process in FOLDER/one, and leaves those of 4 ranks in FOLDER.
"""

import errno
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshtrain.checkpoint import commit
from meshtrain.checkpoint import directory as folder
from meshtrain.checkpoint.retention import Retention
from meshtrain.checkpoint.save import Saver
from meshtrain.checkpoint.shard_file import Shard, write_shard
from meshtrain.checkpoint.state import State
from meshtrain.config import Config
from meshtrain.huggingface.safetensors import Entry
from meshtrain.job.environment import read_environment
from meshtrain.job.exit import job_exit
from meshtrain.job.process import Job, join
from meshtrain.layout import Layout
from meshtrain.mesh import Mesh, build_mesh
from meshtrain.modeling.build import build_model
from meshtrain.parallel.sharding import shape_of
from tests.checkpoint.known import ABOUT, CPU, MODEL, OF_4, clear, fill, on, restore, wrong
from tests.parallel.tensor_parallel_cases import Cases
from tests.parity.experiments import QUICKSTART


class Ranks(Cases):
    def __init__(self, job: Job, place: Path) -> None:
        super().__init__(build_mesh(Layout({"dp_replicate": job.world_size})))
        self.job, self.place = job, place
        self.said: list[str] = []

    def that(self, true: bool, what: str) -> None:
        self.equal(true, True, what)

    def saver(self, state: State, where: str, **how: Any) -> Saver:
        how = {"keep": Retention(keep_last=None), "say": self.said.append} | how
        return Saver(state, self.place / where, self.job, **how)

    # state.py

    def parts(self, kind: str, layout: dict[str, int]) -> None:
        """Each rank holds the parts that the layout says, in the memory that is trained; all list the same tensors."""
        state = on(self.job, layout, "train.precision=float16", kind=kind)
        listed = self.job.gather(
            "comparing", [[name, *map(str, vars(one).values())] for name, one in state.placements.items()]
        )
        self.that(all(other == listed[0] for other in listed), f"{kind}: the same list on every rank")
        config = Config.load(QUICKSTART, [*MODEL, "layout={}"], world_size=1)
        plain = build_model(config, Mesh(Layout({}), 0, "cpu", None, {}), CPU)
        expected = {f"model.{name}" for name, _ in plain.named_parameters()}
        self.equal({name for name in state.placements if name.startswith("model.")}, expected, f"{kind}: names")
        self.equal(len(state.placements), 3 * len(expected) + 3, f"{kind}: averages, updates, and the loss scale")
        values = dict(plain.named_parameters())
        for held in state.shards:
            self.equal(tuple(held.local.shape), shape_of(held.part), f"{kind}: shape of {held.name}")
            if held.name.startswith("model."):
                value = values[held.name.removeprefix("model.")].detach()
                self.that(torch.equal(held.local, value[held.part]), f"{kind}: value of {held.name}")
        names = [held.name for held in state.shards]
        twice = {name for name in names if names.count(name) > 1}
        tied = ["exp_avg", "exp_avg_sq"]
        both = {"model.model.embed_tokens.weight", *(f"optimizer.model.embed_tokens.weight.{each}" for each in tied)}
        self.equal(twice, both if kind == "V" and self.job.rank == 0 else set(), f"{kind}: held twice")
        stages = (0, layout["pp"] - 1) if "pp" in layout and kind != "V" else (0,)
        self.equal(state.placements["model.model.embed_tokens.weight"].stages, stages, f"{kind}: stages")

    # rounds.Round

    def rounds(self) -> None:
        """A rank that has put its value may go on; a thread may wait for the answer, or give up."""
        first, second, third = (self.job.round() for _ in range(3))
        answers: list[Any] = []

        def in_thread() -> None:
            second.put(self.job.rank)
            if self.job.rank == 0:
                second.broadcast({"sum": sum(second.gather())})
            answers.append(second.receive())
            if self.job.rank == 0:
                third.gather()

        def given_up() -> None:
            try:
                in_thread()
            except CancelledError as error:
                answers.append(str(error))

        thread = threading.Thread(target=given_up)
        thread.start()
        self.equal(self.job.gather("meeting meanwhile", self.job.rank), [0, 1, 2, 3], "another meeting")
        first.put(None)
        while not answers:
            time.sleep(0.01)
        self.equal(answers[0], {"sum": 6}, "the answer")
        third.cancel()
        thread.join(20)
        self.that(not thread.is_alive(), "a thread that waits in vain ends")
        if self.job.rank == 0:
            self.that(answers[1].endswith("waits no longer for ranks 0-3"), answers[1])
        self.job.gather("meeting once more", None)
        assert self.job.store is not None
        keys = [f"{meeting.name}/given" for meeting in (first, second)]
        self.equal([self.job.store.check([key]) for key in keys], [True, False], "what was collected is cleared away")

    # save.py

    def training_goes_on(self) -> None:
        """One rank's disk is slow: all go on with their collectives, and the saved state is that of the snapshot."""
        state = on(self.job, OF_4["HSDP"])
        fill(state)
        saver = self.saver(state, "slow")
        with replaced(commit, "write_shard", slowly if self.job.rank == 1 else write_shard):
            saver.save(7, ABOUT)
            for _ in range(50):
                dist.all_reduce(torch.ones(100))
            self.job.gather("going on", None)
            saver.poll()
            self.that(saver.saved is None, "50 sums later the save is still under way")
            clear(state)
            saver.save(8, ABOUT)  # waits for the one before
            self.equal(saver.saved, 7, "a second save waits for the first")
            saver.wait()
        waited = [line for line in self.said if "still being written" in line]
        self.equal(len(waited), int(self.job.rank == 0), "and rank 0 says so")
        self.that(saver.last_wait_s > 0, "waiting is measured")
        saver.close()
        self.load(state, "slow", 7)

    def one_rank_fails(self) -> None:
        """The folder vanishes for one rank: no checkpoint, a message with rank and path, and the previous one stays."""
        own = self.place / f"way_of_rank_{self.job.rank}"
        target = self.place / "vanishing"
        target.mkdir(exist_ok=True)
        own.symlink_to(target)
        state = on(self.job, OF_4["FSDP"])
        fill(state)
        saver = self.saver(state, own.name)
        saver.save(1, ABOUT, wait=True)
        self.equal(saver.problem, None, "a save")
        if self.job.rank == 2:
            own.unlink()
        saver.save(2, ABOUT, wait=True)
        unfinished = f"{own.parent}/way_of_rank_2/.step_0000002.tmp"
        for part in ("rank 2 on host ", "(dp_shard 2)", unfinished, "No such file"):
            self.that(part in str(saver.problem), f"{part} is in {saver.problem}")
        self.equal((saver.saved, saver.diverged, saver.wants_stop), (1, False, None), "the one before")
        self.job.gather("looking", None)
        self.equal(sorted(path.name for path in target.iterdir()), ["step_0000001"], "nothing is left of it")
        if self.job.rank == 2:
            own.symlink_to(target)
        saver.save(3, ABOUT, wait=True)
        self.equal((saver.saved, saver.problem), (3, None), "the next one is well again")
        saver.close()

    def full_disk(self) -> None:
        """The disk of one rank is full: only it writes again when the oldest checkpoint has been deleted."""
        state, written = on(self.job, OF_4["FSDP"]), []
        fill(state)
        saver = self.saver(state, "full", keep=Retention(keep_last=1), make_room=True)
        for step in (1, 2):
            saver.save(step, ABOUT, wait=True)
        assert saver._thread is not None
        saver._thread.join()  # the first is deleted
        self.job.gather("looking", None)
        if self.job.rank == 0:
            shutil.copytree(self.place / "full/step_0000002", self.place / "full/step_0000001")

        def full(path: Path, tensors: Any) -> Any:
            written.append(path)
            if self.job.rank == 2 and len(written) == 1:
                path.write_bytes(b"half of it")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return write_shard(path, tensors)

        with replaced(commit, "write_shard", full):
            saver.save(3, ABOUT, wait=True)
        self.equal((saver.saved, saver.problem), (3, None), "a save that has made room")
        self.equal(len(written), 2 if self.job.rank == 2 else 1, "who writes again")
        made = [line for line in self.said if "step_0000001 was deleted before step 3 was saved" in line]
        self.equal(len(made), int(self.job.rank == 0), "rank 0 says what has gone")
        saver.close()
        self.load(state, "full", 3)

    def differ(self, kind: str, rank: int, name: str, names: str, others: str) -> None:
        """One bit of one rank's copy differs: nothing is saved, and the rank and the tensor are named."""
        state = on(self.job, OF_4[kind], kind=kind)
        fill(state)
        where = f"diverged_{kind}"
        saver = self.saver(state, where)
        saver.save(1, ABOUT, wait=True)
        self.equal(saver.problem, None, f"{kind}: all are equal")
        held = next((held for held in state.shards if held.name == name), None)
        if self.job.rank == rank:
            assert held is not None
            bits = held.local.detach().view(-1).view(torch.int32)
            bits[-1] ^= 1 << 20
        saver.save(2, ABOUT, wait=True)
        problem = str(saver.wants_stop)
        for part in (*names.split("|"), name, others):
            self.that(part in problem, f"{kind}: {part} is in {problem}")
        self.that(saver.diverged, f"{kind}: diverged")
        self.job.gather("looking", None)
        self.equal([p.name for p in (self.place / where).iterdir()], ["step_0000001"], f"{kind}: nothing is saved")
        saver.close()

    def buffers_may_differ(self) -> None:
        """Running statistics depend on a rank's own samples, so they may differ."""
        import meshtrain
        from meshtrain.config.schema import Optimizer as Keys
        from meshtrain.optim.optimizer import Optimizer

        torch.manual_seed(0)
        norm = nn.BatchNorm1d(5).eval()
        model = meshtrain.parallelize(nn.Sequential(nn.Linear(3, 5), norm), self.mesh, verify=False)
        norm.train()  # afterwards, since parallelize would refuse it
        state = State(model, Optimizer(model, Keys(), self.mesh, 1), self.mesh, self.job)
        model(torch.full((4, 3), float(self.job.rank)))
        means = self.job.gather("comparing", model[1].running_mean.tolist())
        self.that(means[0] != means[1], "the statistics differ")
        saver = self.saver(state, "statistics")
        saver.save(1, ABOUT, wait=True)
        self.equal(saver.problem, None, "and are saved all the same")
        saver.close()

    def too_late(self, rank: int, stage: str) -> None:
        """One rank hangs on its disk: all give up the save with the same message; when it is back, saves work again."""
        go = threading.Event()

        def hang(*arguments: Any) -> Any:
            assert go.wait(60)
            return plain(*arguments)

        module, name = (folder, "begin") if stage == "begin" else (commit, "write_shard")
        plain, where = getattr(module, name), f"late_{rank}_{stage}"
        state = on(self.job, OF_4["FSDP"])
        fill(state)
        saver = self.saver(state, where, limit_s=1.0)
        with replaced(module, name, hang if self.job.rank == rank else plain):
            saver.save(1, ABOUT)
            saver.wait()
            outcomes = self.job.gather("comparing", [saver.saved, saver.problem])
            self.equal(outcomes, outcomes[:1] * len(outcomes), f"{where}: all have the same")
            for words in ("it took longer than 1 s (checkpoint.timeout_s): rank ", str(rank)):
                self.that(words in str(saver.problem), f"{words} is in {saver.problem}")
            saver.save(2, ABOUT)
            problem = f"rank {rank} still waits for the disk with that of step 1, which was given up"
            self.equal((saver.problem, saver.wants_stop, saver.saved), (problem, None, None), f"{where}: the next one")
            go.set()
            assert saver._thread is not None
            saver._thread.join(60)
        self.job.gather("coming back", None)
        saver.save(3, ABOUT, wait=True)
        self.equal((saver.saved, saver.problem), (3, None), f"{where}: the one after that")
        self.equal(folder.complete_steps(self.place / where), [3], where)
        saver.close()
        self.load(state, where, 3)

    # load.py

    def load(self, state: State, where: str, step: int) -> None:
        checkpoint = self.place / where / folder.name_of(step)
        clear(state)
        restore(checkpoint, folder.open_manifest(checkpoint)[0], state)
        self.equal(wrong(state), [], f"{where} -> {state.layout}")

    def matrix(self) -> None:
        """Each layout loads what each layout and one process have written, bit for bit."""
        states = {kind: on(self.job, layout, kind=kind) for kind, layout in OF_4.items()}
        for kind, state in states.items():
            fill(state)
            saver = self.saver(state, kind)
            saver.save(4, ABOUT, wait=True)
            self.equal(saver.problem, None, kind)
            saver.close()
        for state in states.values():
            for where in (*states, "one"):
                self.load(state, where, 4)

    def streamed(self) -> None:
        """Without a copy in host memory, the files have the same bytes."""
        for kind in ("HSDP", "V", "pp x tp"):
            state = on(self.job, OF_4[kind], kind=kind)
            fill(state)
            saver = self.saver(state, f"{kind} streamed", in_background=False)
            saver.save(4, ABOUT)
            self.equal((saver.saved, saver.problem), (4, None), kind)
            saver.close()
            name = f"step_0000004/rank_{self.job.rank:05d}.safetensors"
            both = [(self.place / where / name).read_bytes() for where in (kind, f"{kind} streamed")]
            self.that(both[0] == both[1], f"{kind}: the same file")

    def only_what_is_needed(self) -> None:
        """All ranks together read each byte of the checkpoint once, however many copies the layout has."""
        read, counted = Shard.read_bytes, [0]

        def counting(shard: Shard, name: str, begin: int, into: memoryview) -> None:
            counted[0] += len(into)
            read(shard, name, begin, into)

        for kind, layout in OF_4.items():
            state, counted[0] = on(self.job, layout, kind=kind), 0
            with replaced(Shard, "read_bytes", counting):
                self.load(state, "DDP", 4)
            total = sum(self.job.gather("counting", counted[0]))
            sizes = sum(Entry(name, x.dtype, x.shape).nbytes for name, x in state.placements.items())
            if "tp" in kind:  # ranks read whole contiguous rows to get their columns
                self.that(total >= sizes, f"{kind}: {total} of {sizes} bytes")
                continue
            self.equal(total, sizes, f"bytes read by {kind}")

    def killed(self) -> None:
        """A rank dies while it writes. Must be the last case."""
        state = on(self.job, OF_4["FSDP"])
        saver = self.saver(state, "killed")
        saver.save(1, ABOUT, wait=True)
        with replaced(commit, "write_shard", die if self.job.rank == 3 else write_shard):
            saver.save(2, ABOUT, wait=True)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def slowly(*arguments: Any) -> Any:
    time.sleep(1.0)
    return write_shard(*arguments)


def die(path: Path, tensors: Any) -> Any:
    write_shard(path, tensors[: len(tensors) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def run_state(cases: Ranks) -> None:
    for kind, layout in OF_4.items():
        cases.parts(kind, layout)


def run_save(cases: Ranks) -> None:
    cases.rounds()
    cases.training_goes_on()
    cases.one_rank_fails()
    cases.full_disk()
    cases.too_late(2, "write")
    cases.too_late(0, "write")
    cases.too_late(0, "begin")
    embed, norm = "model.model.embed_tokens.weight", "model.model.norm.weight"
    average = "optimizer.model.layers.3.mlp.up_proj.weight.exp_avg_sq"
    cases.differ("DDP", 2, average, "rank 2 on host |(dp_replicate 2) differs from", "the 3 other ranks")
    two = "rank 0 on host |(dp_replicate 0, dp_shard 0) and rank 2 on host |(dp_replicate 1, dp_shard 0) differ from"
    cases.differ("HSDP", 2, "model.model.layers.0.mlp.up_proj.weight", two, "each other")
    cases.differ("tp", 1, norm, "rank 1 on host |(tp 1) differs from", "the 3 other ranks")
    cases.differ("pp", 3, embed, "rank 0 on host |(pp 0) and rank 3 on host |(pp 3) differ from", "each other")
    cases.differ("V", 0, embed, "rank 0 on host |(pp 0) holds two different copies", "what must be equal")
    cases.buffers_may_differ()


def run_load(cases: Ranks) -> None:
    cases.matrix()
    cases.streamed()
    cases.only_what_is_needed()


RUNS: dict[str, Callable[[Ranks], None]] = {
    "state": run_state,
    "save": run_save,
    "load": run_load,
    "killed": Ranks.killed,
}

if __name__ == "__main__":
    job = join(read_environment(os.environ))
    with job_exit(job):
        job.connect(120)
        cases = Ranks(job, Path(sys.argv[1]))
        RUNS[sys.argv[2]](cases)
        cases.tell()
