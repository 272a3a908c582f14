"""Candidates: the checkpoints that a run may resume from, the best first, as rank 0 finds them."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from meshtrain.checkpoint.directory import complete_steps, name_of, step_of
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.errors import InputError
from meshtrain.job.storage import optional, read_guarded, write_whole

# in the run's folder: digest of the config with which the run last went back
WENT_BACK = ".went_back"
BEGUN = (
    "checkpoint.resume names {}, with which this run began; it goes on from its own checkpoints now"
)


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that a run may resume from."""

    path: Path  # as rank 0 sees it
    # sha256 of the manifest, if it is on the hosts' local disks only; None: in a shared folder
    local_digest: str | None = None

    @property
    def step(self) -> int:
        return step_of(self.path.name) or 0


@dataclass
class Candidates:
    """Checkpoints to start from, the best first; without any the run starts at its first step."""

    queue: list[Candidate] = field(default_factory=list)
    older: bool = True  # fall back to an older checkpoint if a newer one is damaged
    back: bool = False  # the user names one of the run's own checkpoints, to go back to
    notes: list[str] = field(default_factory=list)  # lines for people

    @property
    def newest_step(self) -> int:
        """The step of the first candidate; -1 if there is none."""
        return self.queue[0].step if self.queue else -1

    def add_local(
        self, local: LocalDisk, offers: Iterable[tuple[int, str, int]], ranks: int, spec: RunSpec
    ) -> None:
        """Adds checkpoints that are on local disks only, and complete over all hosts.

        Args:
            local: the local disk of this host.
            offers: (step, digest of the manifest, number of ranks that find all they need of it).
            ranks: of the job.
        """
        if self.back:
            return  # the user names the checkpoint
        shared_steps = {
            candidate.step for candidate in self.queue if candidate.path.parent == spec.checkpoints
        }
        # Otherwise `checkpoint.resume` names another run, from which this one is to begin.
        has_begun = not self.queue or bool(shared_steps)
        whole = []
        for step, digest, having in offers:
            if having == ranks:
                whole.append(Candidate(local.own / name_of(step), digest))
            elif has_begun and step not in shared_steps:
                self.notes.append(
                    f"step {step} is on the local disks of {having} of {ranks} ranks, not whole: "
                    "passed over"
                )
        if whole and not has_begun:
            self.notes.append(BEGUN.format(spec.config.checkpoint.resume))
            self.queue = []
            self.older = True
        self.queue += whole
        # The sort is stable: for the same step, the shared one stays first.
        self.queue.sort(key=lambda candidate: -candidate.step)


def find_candidates(spec: RunSpec, *, restarted: bool) -> Candidates:
    """The candidates that `checkpoint.resume` names; a `restarted` job continues from its own,
    whatever the key says.

    Raises InputError: `none` needs a fresh folder and this one is not, or the named path is no
    checkpoint.
    """
    name = spec.config.checkpoint.resume
    own = Candidates(_all_in(spec.checkpoints))
    # A job that is started again by its launcher goes on: its key was obeyed the first time.
    if spec.resumes_latest or (restarted and own.queue):
        return own
    if name == "none":
        if not restarted:
            _require_fresh(spec, own)
        return own
    named = _named(Path(name).expanduser(), own, spec.checkpoints)
    mark = spec.folder / WENT_BACK
    if named.back and _says(mark, _config_digest(spec)):
        own.notes.append(
            f"checkpoint.resume names {name}, to which this run went back with the same config "
            "before; it goes on from its newest checkpoint now. To go back once more, remove "
            f"{mark}"
        )
        return own
    return named


def mark_going_back(spec: RunSpec) -> None:
    """Remembers that the run went back: the next job of a chain, with the same config, does not go
    back once more."""
    with optional("the same command will go back once more"):
        write_whole(spec.folder / WENT_BACK, _config_digest(spec))


def _all_in(folder: Path) -> list[Candidate]:
    """The complete checkpoints in a folder, the newest first."""
    return [Candidate(folder / name_of(step)) for step in reversed(complete_steps(folder))]


def _require_fresh(spec: RunSpec, own: Candidates) -> None:
    metrics = spec.folder / "metrics.jsonl"
    has_rows = metrics.exists() and metrics.stat().st_size > 0
    is_used = has_rows or (spec.folder / "exit.json").exists()
    if own.queue or is_used:
        used = spec.checkpoints if own.queue else spec.folder
        raise InputError(
            f"checkpoint.resume is none, and {used} holds a run already: name a fresh folder with "
            "train.output=FOLDER, or go on with checkpoint.resume=latest"
        )


def _named(folder: Path, own: Candidates, checkpoints: Path) -> Candidates:
    """The candidates of a path: a checkpoint, a folder of checkpoints, or a run's folder."""
    if step_of(folder.name) is not None:
        if folder.parent.resolve() == checkpoints.resolve():
            return Candidates([Candidate(checkpoints / folder.name)], older=False, back=True)
        named = Candidates([Candidate(folder)], older=False)
    else:
        holds = folder if complete_steps(folder) else folder / "checkpoints"
        if holds.resolve() == checkpoints.resolve():
            return own
        named = Candidates(_all_in(holds))
    if own.queue:
        own.notes.append(BEGUN.format(folder))
        return own
    if not named.queue:
        raise InputError(
            f"checkpoint.resume: {folder} is no checkpoint and holds none: expected a folder "
            "step_0000100, a folder of such, or the folder of a run"
        )
    return named


def _says(mark: Path, text: str) -> bool:
    """Whether a file beside the run has this text; one that cannot be read says nothing."""
    try:
        return read_guarded(mark) == text.encode()
    except OSError:
        return False


def _config_digest(spec: RunSpec) -> str:
    """Digest of the config, `checkpoint.resume` included; without the layout, which the next job
    may change."""
    config = {name: value for name, value in spec.config.plain().items() if name != "layout"}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
