"""With which state a run begins: one rank decides, all verify that they see the same, and nothing is done silently."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.agreement import Topic, agree
from meshtrain.checkpoint.changes import Changes, compare_configs
from meshtrain.checkpoint.folder import complete_steps, name_of, open_manifest, read_manifest, set_aside, step_of
from meshtrain.checkpoint.load import restore
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.retry import retried
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.verify import problems_of
from meshtrain.errors import DamagedError, InputError, MissingError, TrainingError, UnreadableError
from meshtrain.runtime import Job

if TYPE_CHECKING:
    from meshtrain.config import Config

MOST_ASKED = 4  # files that another host reads, before it is believed that they are damaged


@dataclass(frozen=True)
class Wanted:
    """The run that is wanted, with which a checkpoint has to agree.

    Attributes:
        folder: of the run.
        checkpoints: the folder of the run's own checkpoints.
        data: fingerprint and sizes, as a manifest has them.
        versions: of torch, Python, meshtrain and the code.
        steps: the run's last step.
    """

    config: "Config"
    folder: Path
    checkpoints: Path
    data: dict[str, Any]
    versions: dict[str, str]
    steps: int


@dataclass
class Candidates:
    """Checkpoints to begin with, the best first; without any the run begins at its first step.

    Attributes:
        paths: of checkpoints.
        older: whether an older one is taken where a newer one is damaged.
        back: whether the user names one of the run's own, to go back to.
        said: lines for people.
    """

    paths: list[Path] = field(default_factory=list)
    older: bool = True
    back: bool = False
    said: list[str] = field(default_factory=list)


class Resume:
    """Which checkpoint a run goes on from. All ranks have the same.

    Attributes:
        checkpoint: its folder; None: the run begins at its first step.
        manifest: what it says of itself.
        back: whether the user asked to go back to one of the run's own.
    """

    def __init__(self, job: Job, wanted: Wanted) -> None:
        """Decides, by the manifests alone.

        Raises:
            InputError: there is nothing that the run could begin with, or it contradicts the config; on every rank.
        """
        self._job, self._wanted = job, wanted
        self.checkpoint: Path | None = None
        self.manifest: Manifest | None = None
        self.back = False
        self._candidates = Candidates()
        self._damaged: list[str] = []
        with job.together("choosing a checkpoint"):
            if job.rank == 0:
                self._candidates = retried(lambda: candidates(wanted, restarted=job.again))
        self._take_first()

    @property
    def step(self) -> int:
        """Updates done when the run begins."""
        return 0 if self.manifest is None else self.manifest.step

    def restore(self, state: State) -> None:
        """Fills the state from the checkpoint: each rank reads its part of it, and verifies what it reads.

        A damaged one is told; with `resume: latest` the next older one is taken. What cannot be read, or not by every
        host, is not damaged.

        Raises:
            InputError: on every rank: there is no other one, or it is not that of this model.
            TrainingError: on every rank: a host cannot read it.
        """
        while self.checkpoint is not None and self.manifest is not None:
            checkpoint, manifest, damage = self.checkpoint, self.manifest, None
            with self._job.together(f"loading {checkpoint}"):
                try:
                    retried(lambda: restore(checkpoint, manifest, state), MissingError)  # noqa: B023
                except DamagedError as error:
                    damage = [str(error), error.file.name]
            told = self._job.gather("loading", [self._job.host, damage])
            found = [one for _, one in told if one is not None]
            if not found:
                break
            names = [file_of(rank) for rank in range(len(manifest.files))]
            for name, text in list({name: text for text, name in found}.items())[:MOST_ASKED]:
                blind = {host for host, one in told if one is not None and one[1] == name}
                of = names.index(name)
                self._ask(told, blind, text, lambda: not list(problems_of(checkpoint, manifest, of)))  # noqa: B023
            if self._job.rank == 0:
                self._damaged += dict.fromkeys(text for text, _ in found)
                self._candidates.paths.pop(0)
            self._take_first()
        with self._job.together("setting later checkpoints aside"):
            self._make_way()

    def _ask(self, told: Sequence[Sequence[Any]], blind: set[str], text: str, is_whole: Callable[[], bool]) -> None:
        """Has another host, if there is one, look at what some hosts take for damaged.

        Args:
            told: of each rank its host first.
            blind: these hosts.
            text: what they say of it.

        Raises:
            TrainingError: on every rank: the other host finds it whole, so there is nothing wrong with the checkpoint.
        """
        witness = next((rank for rank, (host, _) in enumerate(told) if host not in blind), None)
        whole = False
        with self._job.together("looking at a checkpoint from another host"):
            if self._job.rank == witness:
                whole = retried(is_whole)
        if any(self._job.gather("looking at a checkpoint from another host", whole)):
            assert witness is not None  # it was whole there
            raise TrainingError(
                f"host {', '.join(sorted(blind))} cannot read what host {told[witness][0]} reads: {text}. Nothing is "
                "wrong with the checkpoint: see to the mount and the memory of that host, and start again"
            )

    @property
    def own(self) -> bool:
        """Whether it is a checkpoint of this run, and not that of another."""
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == self._wanted.checkpoints.resolve()

    @property
    def books(self) -> dict[str, Any] | None:
        """What was counted up to then; None where the run begins at its first step."""
        return None if self.manifest is None else books_of(self.manifest)

    def loading(self, state: State) -> Iterator[str]:
        """`restore`, and the lines that are said about it."""
        self.restore(state)
        yield from self._candidates.said
        if self.manifest is None:
            return
        yield f"goes on from {self.checkpoint}: step {self.step}, written {self.manifest.written}"
        found = compare(self.manifest, self._wanted, self._job)
        if found.listed:
            yield "changed since that checkpoint: " + "; ".join(found.listed)

    def _take_first(self) -> None:
        """Goes to the first candidate whose manifest is whole, the same one on all ranks."""
        problem: str | None = ""
        while problem is not None:
            chosen = problem = None
            with self._job.together("choosing a checkpoint"):
                if self._job.rank == 0:
                    chosen, problem = self._first()
            told = self._job.gather("choosing a checkpoint", [self._job.host, [chosen, problem, self._candidates.back]])
            path, problem, self.back = told[0][1]
            if problem is not None:
                self._ask(told, {told[0][0]}, problem, lambda: _is_whole(Path(path)))  # noqa: B023
                if self._job.rank == 0:
                    self._damaged.append(problem)
                    self._candidates.paths.pop(0)
        self.checkpoint = self.manifest = None
        if path is None:
            return
        self.checkpoint, digest = Path(path), ""
        with self._job.together(f"reading the manifest of {path}"):
            self.manifest, digest = self._read_manifest(self.checkpoint)
        agree(self._job, Topic(f"the manifest of {path}", {"digest": digest}, "all hosts have to see the same folder"))
        with self._job.together("comparing the checkpoint with the config"):
            if self._job.rank == 0:
                check(self.manifest, self._wanted, self._job, self.checkpoint)

    def _read_manifest(self, checkpoint: Path) -> tuple[Manifest, str]:
        """Rank 0 has done so, and looked at the files."""
        try:
            return retried(lambda: read_manifest(checkpoint), *(() if self._job.rank == 0 else (InputError,)))
        except InputError as error:
            if self.own and self._job.rank > 0:  # all hosts see that folder, as they have proved
                raise UnreadableError(checkpoint, f"{error}, and rank 0 has read it") from error
            raise

    def _first(self) -> tuple[str | None, str | None]:
        """On rank 0: the first candidate, if there is one, and what is wrong with it."""
        found = self._candidates
        if found.paths and (found.older or not self._damaged):
            try:
                retried(lambda: open_manifest(found.paths[0]), MissingError)
            except DamagedError as error:
                return str(found.paths[0]), str(error)
            return str(found.paths[0]), None
        if self._damaged:
            listed = "\n".join(f"  {line}" for line in self._damaged)
            raise InputError(
                f"no checkpoint is whole that this run could go on from:\n{listed}\n"
                f"To begin anew, name another folder with train.output=FOLDER, or move {self._wanted.checkpoints} away"
            )
        return None, None

    def _make_way(self) -> None:
        """On rank 0: the run's own checkpoints of later steps would be taken for newer ones. They are set aside."""
        if self._job.rank != 0:
            return
        self._candidates.said += [f"damaged: {line}" for line in self._damaged]
        for step in complete_steps(self._wanted.checkpoints):
            if step > self.step:
                path = self._wanted.checkpoints / name_of(step)
                self._candidates.said.append(f"{path} is set aside as {set_aside(path).name}")


def _is_whole(checkpoint: Path) -> bool:
    """By its manifest and the sizes of its files."""
    try:
        open_manifest(checkpoint)
    except InputError:
        return False
    return True


def candidates(wanted: Wanted, *, restarted: bool) -> Candidates:
    """What `checkpoint.resume` stands for in the run's folder as it is.

    Args:
        restarted: whether the launcher has started this job again: it then goes on, whatever the config says.

    Raises:
        InputError: a fresh folder is wanted and this one is not, or what is named is no checkpoint.
    """
    name = wanted.config.checkpoint.resume
    steps = complete_steps(wanted.checkpoints)
    own = Candidates([wanted.checkpoints / name_of(step) for step in reversed(steps)])
    if name == "latest" or (restarted and steps):
        return own
    if name == "none":
        if not restarted and (steps or _is_used(wanted.folder)):
            used = wanted.checkpoints if steps else wanted.folder
            raise InputError(
                f"checkpoint.resume is none, and {used} holds a run already: name a fresh folder with "
                "train.output=FOLDER, or go on with checkpoint.resume=latest"
            )
        return own
    return _named(Path(name).expanduser(), own, wanted.checkpoints)


def _is_used(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return (folder / "exit.json").exists() or (metrics.exists() and metrics.stat().st_size > 0)


def _named(folder: Path, own: Candidates, checkpoints: Path) -> Candidates:
    """What a path stands for: a checkpoint, a folder of checkpoints, or a run's folder."""
    if step_of(folder.name) is not None:
        if folder.parent.resolve() == checkpoints.resolve():
            return Candidates([checkpoints / folder.name], older=False, back=True)
        given = Candidates([folder], older=False)
    else:
        holds = folder if complete_steps(folder) else folder / "checkpoints"
        if holds.resolve() == checkpoints.resolve():
            return own
        given = Candidates([holds / name_of(step) for step in reversed(complete_steps(holds))])
    if own.paths:
        own.said.append(
            f"checkpoint.resume names {folder}, with which this run began; it goes on from its own checkpoints now"
        )
        return own
    if not given.paths:
        raise InputError(
            f"checkpoint.resume: {folder} is no checkpoint and holds none: expected a folder step_0000100, a folder of "
            "such, or the folder of a run"
        )
    return given


def books_of(manifest: Manifest) -> dict[str, Any]:
    """The books of a run's report, as `Report.books` wrote them.

    Raises:
        InputError: they are not.
    """
    books: Mapping[str, Any] = manifest.books
    epoch: Any = books.get("epoch")
    good = (
        type(books.get("tokens")) is int and isinstance(epoch, dict) and epoch.keys() == {"loss", "targets", "correct"}
    )
    if not good or not all(isinstance(number, int | float | None) for number in epoch.values()):
        raise InputError(f"the manifest of step {manifest.step} does not say what was counted: its books are broken")
    return dict(books)


# What has to agree --------------------------------------------------------------------------------------------------


def compare(manifest: Manifest, wanted: Wanted, job: Job) -> Changes:
    """What is different now from what the checkpoint was written with."""
    other_data = wanted.config.checkpoint.allow_other_data
    changes = compare_configs(manifest.config, json.loads(json.dumps(wanted.config.plain())), other_data=other_data)
    then, now = _data(manifest.data), _data(wanted.data)
    if len(then[1]) == 1:  # before images had a fingerprint of the validation
        now = now[0], now[1][:1]
    changes.add("the data", then, now, refuse=not other_data, words=_data_words)
    assert job.layout is not None
    changes.add("layout", manifest.layout.sizes, job.layout.sizes)
    changes.add("the last step, where the learning rate ends", manifest.books.get("steps"), wanted.steps)
    for name, version in wanted.versions.items():
        changes.add(name, manifest.versions.get(name), version)
    return changes


def _data(about: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The number of samples, and the digests of the training's data and of the validation's own."""
    return about.get("train"), str(about.get("fingerprint")).split()


def _data_words(found: tuple[Any, list[str]]) -> str:
    return f"{found[0]} samples, fingerprint {' '.join(digest[:12] for digest in found[1])}"


def check(manifest: Manifest, wanted: Wanted, job: Job, checkpoint: Path) -> None:
    """Whether a run can go on from a checkpoint.

    Raises:
        InputError: it is another run's: everything that differs and may not is named, each with both values.
    """
    found = compare(manifest, wanted, job)
    if found.refused:
        way = "take the values of the checkpoint, or another folder for another run with train.output=FOLDER"
        if any(line.startswith(("data.", "the data:")) for line in found.refused):
            way += ", or allow other data with checkpoint.allow_other_data=true"
        lines = "\n".join(f"  {line}" for line in found.refused)
        raise InputError(f"the config is not that of {checkpoint} (there -> here):\n{lines}\n{way}")
    books_of(manifest)
    if manifest.step > wanted.steps:
        raise InputError(
            f"{checkpoint} is of step {manifest.step}, and this run ends at step {wanted.steps}: give it more steps, "
            "name another folder with train.output=FOLDER, or an earlier checkpoint with checkpoint.resume=CHECKPOINT"
        )
