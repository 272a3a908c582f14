"""With which state a run begins: one rank decides, all verify that they see the same, and nothing is done silently."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.agreement import Topic, agree
from meshtrain.checkpoint.changes import Changes, compare_configs
from meshtrain.checkpoint.folder import complete_steps, name_of, open_manifest, read_manifest, set_aside, step_of
from meshtrain.checkpoint.load import restore
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.state import State
from meshtrain.errors import DamagedError, InputError
from meshtrain.runtime import Job

if TYPE_CHECKING:
    from meshtrain.config import Config


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
                self._candidates = candidates(wanted, restarted=job.again)
        self._take_first()

    @property
    def step(self) -> int:
        """Updates done when the run begins."""
        return 0 if self.manifest is None else self.manifest.step

    def restore(self, state: State) -> None:
        """Fills the state from the checkpoint: each rank reads its part of it, and verifies what it reads.

        A damaged one is told; with `resume: latest` the next older one is taken.

        Raises:
            InputError: on every rank: there is no other one, or it is not that of this model.
        """
        while self.checkpoint is not None and self.manifest is not None:
            damage = None
            with self._job.together(f"loading {self.checkpoint}"):
                try:
                    restore(self.checkpoint, self.manifest, state)
                except DamagedError as error:
                    damage = str(error)
            found = dict.fromkeys(text for text in self._job.gather("loading", damage) if text is not None)
            if not found:
                break
            if self._job.rank == 0:
                self._damaged += found
                self._candidates.paths.pop(0)
            self._take_first()
        self._make_way()

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
        chosen = None
        with self._job.together("choosing a checkpoint"):
            if self._job.rank == 0:
                chosen = self._first_whole()
        path, self.back = self._job.gather("choosing a checkpoint", [chosen, self._candidates.back])[0]
        self.checkpoint = self.manifest = None
        if path is None:
            return
        self.checkpoint, digest = Path(path), ""
        with self._job.together(f"reading the manifest of {path}"):
            self.manifest, digest = read_manifest(self.checkpoint)  # rank 0 has looked at the files
        agree(self._job, Topic(f"the manifest of {path}", {"digest": digest}, "all hosts have to see the same folder"))
        with self._job.together("comparing the checkpoint with the config"):
            if self._job.rank == 0:
                check(self.manifest, self._wanted, self._job, self.checkpoint)

    def _first_whole(self) -> str | None:
        """On rank 0."""
        found = self._candidates
        while found.paths:
            if self._damaged and not found.older:
                break
            try:
                open_manifest(found.paths[0])
                return str(found.paths[0])
            except DamagedError as error:
                self._damaged.append(str(error))
                found.paths.pop(0)
        if self._damaged:
            listed = "\n".join(f"  {line}" for line in self._damaged)
            raise InputError(
                f"no checkpoint is whole that this run could go on from:\n{listed}\n"
                f"To begin anew, name another folder with train.output=FOLDER, or move {self._wanted.checkpoints} away"
            )
        return None

    def _make_way(self) -> None:
        """On rank 0: the run's own checkpoints of later steps would be taken for newer ones. They are set aside."""
        if self._job.rank != 0:
            return
        self._candidates.said += [f"damaged: {line}" for line in self._damaged]
        for step in complete_steps(self._wanted.checkpoints):
            if step > self.step:
                path = self._wanted.checkpoints / name_of(step)
                self._candidates.said.append(f"{path} is set aside as {set_aside(path).name}")


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
    changes.add("the data", _data(manifest.data), _data(wanted.data), refuse=not other_data)
    assert job.layout is not None
    changes.add("layout", manifest.layout.sizes, job.layout.sizes)
    changes.add("the last step, where the learning rate ends", manifest.books.get("steps"), wanted.steps)
    for name, version in wanted.versions.items():
        changes.add(name, manifest.versions.get(name), version)
    return changes


def _data(about: Any) -> str:
    return f"{about.get('train')} samples, fingerprint {str(about.get('fingerprint'))[:12]}"


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
