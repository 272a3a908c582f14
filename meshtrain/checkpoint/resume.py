"""Resume: the state a run starts from. One rank decides, all verify that they see the same files,
and print changes."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshtrain.checkpoint.config_diff import check, compare, counters_of
from meshtrain.checkpoint.directory import (
    complete_steps,
    name_of,
    open_manifest,
    read_manifest,
    set_aside,
    step_of,
)
from meshtrain.checkpoint.load import exchange, files_needed, read_shares
from meshtrain.checkpoint.local import Known, LocalDisk
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.upload import Uploads
from meshtrain.checkpoint.verify import problems_of
from meshtrain.errors import DamagedError, InputError, MissingError, TrainingError, UnreadableError
from meshtrain.job.consistency import Fingerprint, require_equal
from meshtrain.job.process import Job
from meshtrain.job.storage import optional, read_guarded, warn, with_retries, write_whole

if TYPE_CHECKING:
    from meshtrain.config import Config

# in the run's folder: digest of the config with which the run last went back
WENT_BACK = ".went_back"
BEGUN = (
    "checkpoint.resume names {}, with which this run began; it goes on from its own checkpoints now"
)
MOST_ASKED = 4  # files that another host is asked to read before they count as damaged


@dataclass(frozen=True)
class RunSpec:
    """The run that a checkpoint has to agree with."""

    config: "Config"
    folder: Path
    checkpoints: Path  # the folder of the run's own checkpoints
    data: dict[str, Any]  # fingerprint and sizes, as in a manifest
    versions: dict[str, str]  # of torch, Python, meshtrain and the code
    steps: int  # the run's last step
    local: LocalDisk | None = None  # local disk, to which checkpoints are written first
    uploads: Uploads | None = None  # on rank 0: object storage that may have checkpoints


@dataclass
class Candidates:
    """Checkpoints to start from, the best first; without any the run starts at its first step."""

    paths: list[Path] = field(default_factory=list)
    older: bool = True  # fall back to an older checkpoint if a newer one is damaged
    back: bool = False  # the user names one of the run's own checkpoints, to go back to
    # checkpoints on local disks only -> sha256 of the manifest
    local: dict[Path, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # lines for people


class Resume:
    """The checkpoint that a run resumes from, the same on all ranks."""

    def __init__(self, job: Job, spec: RunSpec) -> None:
        """Decides from the manifests alone. Raises InputError on every rank: none is usable, or the
        configs differ."""
        self._job, self._spec = job, spec
        self.checkpoint: Path | None = None  # None: the run starts at its first step
        self.manifest: Manifest | None = None
        self.back = False  # the user asked to go back to one of the run's own checkpoints
        self._candidates = Candidates()
        self._damaged: list[str] = []
        self._digest = ""  # sha256 of the manifest
        # on rank 0: steps in storage that were not tried yet
        self._uploaded: list[int] | None = None
        # the checkpoint is complete on the hosts' own disks, but not in the shared folder
        self._local_only = False
        with job.collective_check("choosing a checkpoint"):
            if job.rank == 0:
                self._candidates = with_retries(lambda: candidates(spec, restarted=job.again))
                if not job.again:
                    self._require_fresh_storage()
                self._claim_storage()
        if spec.local is not None and job.layout is not None:
            self._add_local(spec.local.offers(job.layout))
        self._take_first()

    @property
    def step(self) -> int:
        """Updates already done when the run starts."""
        return 0 if self.manifest is None else self.manifest.step

    def restore(self, state: State) -> None:
        """Fills the state from the checkpoint; with `resume: latest`, from the next older one if
        that is damaged.

        Raises:
            InputError: on every rank: no candidate is left, or the checkpoint is not of this model.
            TrainingError: on every rank: a host cannot read files that another host can.
        """
        while self.checkpoint is not None and self.manifest is not None:
            checkpoint, manifest, damage = self.checkpoint, self.manifest, None
            with self._job.collective_check(f"loading {checkpoint}"):
                try:
                    local = self._local_files(manifest, state)
                    with_retries(
                        partial(self._read, checkpoint, manifest, state, local), MissingError
                    )
                except (DamagedError, UnreadableError) as error:
                    if isinstance(error, UnreadableError) and not self._local_only:
                        raise
                    # a local disk that stays unreadable counts as damaged
                    damage = [
                        str(error),
                        error.file.name,
                    ]
            # If no rank found damage, no rank needs the reports of the others.
            report = [self._job.host, damage]
            reports = self._job.reduce(
                "loading", report, lambda of: of if any(damage for _, damage in of) else []
            )
            damages = [report for _, report in reports if report is not None]
            if not damages:
                exchange(state)
                if self._spec.local is not None:
                    count, ranks = (
                        self._job.reduce("loading", bool(local), sum),
                        self._job.world_size,
                    )
                    self._candidates.notes.append(
                        f"{count} of {ranks} ranks read from their local disks"
                    )
                break
            names = [file_of(rank) for rank in range(len(manifest.files))]
            # only one host has them
            in_doubt = {} if self._local_only else {name: text for text, name in damages}
            for name, text in list(in_doubt.items())[:MOST_ASKED]:
                blind = {
                    host for host, report in reports if report is not None and report[1] == name
                }
                of = names.index(name)
                unharmed = partial(_has_no_problem, checkpoint, manifest, of)
                self._ask(reports, blind, text, unharmed)
            if self._job.rank == 0:
                self._damaged += dict.fromkeys(text for text, _ in damages)
                self._candidates.paths.pop(0)
            self._take_first()
        with self._job.collective_check("setting later checkpoints aside"):
            self._make_way()

    def _add_local(self, offers: Sequence[Known]) -> None:
        """Adds checkpoints that are on local disks only, and complete over all hosts, to the run's
        own candidates."""
        assert self._spec.local is not None
        counts, ranks = (
            self._job.reduce("looking at the local disks", offers, _count_offers),
            self._job.world_size,
        )
        candidates, checkpoints = self._candidates, self._spec.checkpoints
        if self._job.rank != 0 or candidates.back:
            return
        shared = {path.name for path in candidates.paths if path.parent == checkpoints}
        begun = not candidates.paths or bool(shared)  # else `checkpoint.resume` names another run
        for (step, digest), having in counts:
            if having == ranks:
                candidates.local[self._spec.local.own / name_of(step)] = digest
            elif begun and name_of(step) not in shared:
                candidates.notes.append(
                    f"step {step} is on the local disks of {having} of {ranks} ranks, not whole: "
                    "passed over"
                )
        if candidates.local and not begun:
            candidates.notes.append(BEGUN.format(self._spec.config.checkpoint.resume))
            candidates.paths, candidates.older = [], True
        candidates.paths += candidates.local
        # for the same step, the shared one first
        candidates.paths.sort(key=lambda path: -(step_of(path.name) or 0))

    def _local_files(self, manifest: Manifest, state: State) -> dict[int, Path]:
        """Files that this rank reads from its local disk: all it needs, or none. MissingError: some
        exist nowhere."""
        if self._spec.local is None:
            return {}
        files = self._spec.local.inventory().get((manifest.step, self._digest), {})
        missing = (
            files_needed(manifest, state.placements, state.layout, self._job.rank) - files.keys()
        )
        if missing and self._local_only:
            raise MissingError(
                self._spec.local.own / name_of(manifest.step) / file_of(min(missing))
            )
        return {} if missing else files

    def _read(
        self, checkpoint: Path, manifest: Manifest, state: State, local: dict[int, Path]
    ) -> None:
        try:
            read_shares(checkpoint, manifest, state, local)
        except (DamagedError, OSError) as error:
            if not local or self._local_only:
                raise
            warn(f"on host {self._job.host}: {error}; the shared folder is read instead")
            local.clear()
            read_shares(checkpoint, manifest, state)

    def _ask(
        self,
        reports: Sequence[Sequence[Any]],
        blind: set[str],
        text: str,
        look: Callable[[], object],
    ) -> None:
        """Asks another host, if there is one, to check files that the hosts `blind` found damaged
        (`text` says how).

        `reports`: one per rank, its host first. `look` returns whether the files are intact, or
        raises InputError. Raises TrainingError on every rank: the files are intact for the other
        host.
        """
        witness = next((rank for rank, (host, _) in enumerate(reports) if host not in blind), None)
        whole = False
        with self._job.collective_check("looking at a checkpoint from another host"):
            if self._job.rank == witness:
                with suppress(InputError):
                    whole = bool(with_retries(look))
        if self._job.reduce("looking at a checkpoint from another host", whole, any):
            assert witness is not None  # the checkpoint was intact there
            raise TrainingError(
                f"host {', '.join(sorted(blind))} cannot read what host {reports[witness][0]} "
                f"reads: {text}. Nothing "
                "is wrong with the checkpoint: see to the mount and the memory of that host, and "
                "start again"
            )

    @property
    def own(self) -> bool:
        """Whether the checkpoint is one of this run, and not another run's."""
        return (
            self.checkpoint is not None
            and self.checkpoint.parent.resolve() == self._spec.checkpoints.resolve()
        )

    @property
    def counters(self) -> dict[str, Any] | None:
        """The counters at the checkpoint; None if the run starts at its first step."""
        return None if self.manifest is None else counters_of(self.manifest)

    def about(self) -> Iterator[str]:
        yield from self._candidates.notes
        if self.manifest is None:
            return
        yield f"goes on from {self.checkpoint}: step {self.step}, written {self.manifest.written}"
        changes = compare(self.manifest, self._spec, self._job)
        if changes.listed:
            yield "changed since that checkpoint: " + "; ".join(changes.listed)

    def _take_first(self) -> None:
        """Takes the first candidate whose manifest is intact, the same one on all ranks."""
        problem: str | None = ""
        while problem is not None:
            chosen = problem = None
            with self._job.collective_check("choosing a checkpoint"):
                if self._job.rank == 0:
                    chosen, problem = self._first()
            local_digest = self._candidates.local.get(Path(chosen)) if chosen is not None else None
            choice = [self._job.host, [chosen, problem, self._candidates.back, local_digest]]
            # Rank 0's choice; if it found a problem, also the hosts of all ranks, to ask another
            # host about it.
            choices = self._job.reduce(
                "choosing a checkpoint", choice, lambda of: of if of[0][1][1] else of[:1]
            )
            path, problem, self.back, local_digest = choices[0][1]
            if problem is not None:
                self._ask(choices, {choices[0][0]}, problem, lambda: open_manifest(Path(path)))  # noqa: B023
                if self._job.rank == 0:
                    self._damaged.append(problem)
                    self._candidates.paths.pop(0)
        self.checkpoint = self.manifest = None
        if path is None:
            return
        self.checkpoint, self._digest, self._local_only = Path(path), "", local_digest is not None
        with self._job.collective_check(f"reading the manifest of {path}"):
            # each host has it on its own disk
            if local_digest is not None and self._spec.local is not None:
                files = self._spec.local.inventory()[
                    step_of(self.checkpoint.name) or 0, local_digest
                ]
                self.checkpoint = next(iter(files.values()))
            self.manifest, self._digest = self._read_manifest(self.checkpoint)
        require_equal(
            self._job,
            Fingerprint(
                f"the manifest of {path}",
                {"digest": self._digest},
                "all hosts have to see the same folder",
            ),
        )
        with self._job.collective_check("comparing the checkpoint with the config"):
            if self._job.rank == 0:
                check(self.manifest, self._spec, self._job, self.checkpoint)

    def _read_manifest(self, checkpoint: Path) -> tuple[Manifest, str]:
        """Reads the manifest, which rank 0 has already read, together with checking the files."""
        try:
            return with_retries(
                lambda: read_manifest(checkpoint), *(() if self._job.rank == 0 else (InputError,))
            )
        except InputError as error:
            if self.own and self._job.rank > 0:  # all hosts have been shown to see that folder
                raise UnreadableError(checkpoint, f"{error}, and rank 0 has read it") from error
            raise

    def _first(self) -> tuple[str | None, str | None]:
        """On rank 0: the first candidate, or None, and what is wrong with it, or None."""
        self._fetch_newer()
        paths = self._candidates.paths
        if paths and (self._candidates.older or not self._damaged):
            if paths[0] in self._candidates.local:  # each rank has checked its own files
                return str(paths[0]), None
            try:
                with_retries(lambda: open_manifest(paths[0]), MissingError)
            except DamagedError as error:
                return str(paths[0]), str(error)
            return str(paths[0]), None
        if self._damaged:
            listed = "\n".join(f"  {line}" for line in self._damaged)
            raise InputError(
                f"no checkpoint is whole that this run could go on from:\n{listed}\n"
                "To begin anew, name another folder with train.output=FOLDER, or move "
                f"{self._spec.checkpoints} away"
            )
        return None, None

    def _require_fresh_storage(self) -> None:
        """On rank 0. Raises InputError: this run starts anew, and its upload URL holds another
        run's checkpoints."""
        uploads = self._spec.uploads
        if uploads is None or self._spec.config.checkpoint.resume != "none":
            return
        # each client has error types of its own; the first upload reports a failure
        with suppress(Exception):
            self._uploaded = uploads.steps()
        if self._uploaded:
            raise InputError(
                f"checkpoint.resume is none, and {uploads.url} holds {name_of(self._uploaded[-1])} "
                "of a run already, "
                "which this one would replace: name a prefix of its own with "
                "checkpoint.upload=URL, or go on with "
                "checkpoint.resume=latest"
            )

    def _claim_storage(self) -> None:
        """On rank 0. InputError: where this run is to upload to, there are checkpoints of another
        one."""
        uploads, adopt = (
            self._spec.uploads,
            self._job.again or self._spec.config.checkpoint.resume == "latest",
        )
        try:
            if uploads is not None:
                uploads.claim(self._spec.checkpoints, adopt=adopt)
        except InputError:
            raise
        # each client has errors of its own; it is said where checkpoints are looked for or uploaded
        except Exception:
            return

    def _fetch_newer(self) -> None:
        """On rank 0: downloads the newest intact checkpoint from object storage, if it is newer
        than the first candidate. Raises InputError: storage cannot be asked, and there is no
        candidate."""
        uploads, candidates = self._spec.uploads, self._candidates
        if uploads is None or not (
            self._job.again or self._spec.config.checkpoint.resume == "latest"
        ):
            return
        try:
            self._uploaded = uploads.steps() if self._uploaded is None else self._uploaded
        except Exception as error:  # each client has error types of its own
            text = (
                f"{uploads.url} cannot be asked for checkpoints ({type(error).__name__}: {error})"
            )
            if not candidates.paths:
                raise InputError(
                    f"{text}, and none is here: see to it, or begin with checkpoint.resume=none"
                ) from error
            self._uploaded = []
            candidates.notes.append(f"warning: {text}")
        while self._uploaded and (
            not candidates.paths or self._uploaded[-1] > (step_of(candidates.paths[0].name) or 0)
        ):
            step = self._uploaded.pop()
            try:
                candidates.paths.insert(0, uploads.fetch(step, self._spec.checkpoints))
            except (DamagedError, FileNotFoundError) as error:
                candidates.notes.append(f"{uploads.url}/{name_of(step)} is passed over: {error}")
            except Exception as error:  # it may be intact: taking an older one would lose steps
                raise UnreadableError(
                    f"{uploads.url}/{name_of(step)}",
                    f"{type(error).__name__}: {error}. Start again, or name an older one with "
                    "checkpoint.resume=PATH",
                ) from error
            else:
                candidates.notes.append(f"{name_of(step)} was brought from {uploads.url}")
                candidates.older = True
                return

    def _make_way(self) -> None:
        """Sets aside, on rank 0, the run's own checkpoints of later steps: they would be taken for
        newer ones."""
        if self._spec.local is not None:
            self._spec.local.remove_later(self.step)
            self._spec.local.went_on_from = self.step if self._local_only else None
        if self._job.rank != 0:
            return
        if self._spec.uploads is not None:
            try:
                self._spec.uploads.set_aside_later(self.step)
            except (
                Exception
            ) as error:  # each client has error types of its own; the first upload tries again
                self._candidates.notes.append(
                    f"warning: {self._spec.uploads.url}: {type(error).__name__}: {error}"
                )
        self._candidates.notes += [f"damaged: {line}" for line in self._damaged]
        for step in complete_steps(self._spec.checkpoints):
            if step > self.step:
                path = self._spec.checkpoints / name_of(step)
                self._candidates.notes.append(f"{path} is set aside as {set_aside(path).name}")
        if self.back:
            with optional("the same command will go back once more"):
                write_whole(self._spec.folder / WENT_BACK, _digest(self._spec))


def candidates(spec: RunSpec, *, restarted: bool) -> Candidates:
    """The candidates that `checkpoint.resume` names; a `restarted` job continues from its own,
    whatever the key says.

    Raises InputError: `none` needs a fresh folder and this one is not, or the named path is no
    checkpoint.
    """
    name = spec.config.checkpoint.resume
    steps = complete_steps(spec.checkpoints)
    own = Candidates([spec.checkpoints / name_of(step) for step in reversed(steps)])
    if name == "latest" or (restarted and steps):
        return own
    if name == "none":
        metrics = spec.folder / "metrics.jsonl"
        is_used = (spec.folder / "exit.json").exists() or (
            metrics.exists() and metrics.stat().st_size > 0
        )
        if not restarted and (steps or is_used):
            used = spec.checkpoints if steps else spec.folder
            raise InputError(
                f"checkpoint.resume is none, and {used} holds a run already: name a fresh folder "
                "with "
                "train.output=FOLDER, or go on with checkpoint.resume=latest"
            )
        return own
    named = _from_path(Path(name).expanduser(), own, spec.checkpoints)
    mark = spec.folder / WENT_BACK
    if named.back and _says(mark, _digest(spec)):
        own.notes.append(
            f"checkpoint.resume names {name}, to which this run went back with the same config "
            "before; it goes on from "
            f"its newest checkpoint now. To go back once more, remove {mark}"
        )
        return own
    return named


def _says(mark: Path, text: str) -> bool:
    """Whether a file beside the run has this text; one that cannot be read says nothing."""
    try:
        return read_guarded(mark) == text.encode()
    except OSError:
        return False


def _count_offers(offers: list[list[list]]) -> list[tuple]:
    """((step, digest), number of ranks that offer it) of every offered checkpoint, ascending."""
    return sorted(Counter((step, digest) for of in offers for step, digest in of).items())


def _digest(spec: RunSpec) -> str:
    """Digest of the config, `checkpoint.resume` included; without the layout, which the next job
    may change."""
    config = {name: value for name, value in spec.config.plain().items() if name != "layout"}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def _from_path(folder: Path, own: Candidates, checkpoints: Path) -> Candidates:
    """The candidates of a path: a checkpoint, a folder of checkpoints, or a run's folder."""
    if step_of(folder.name) is not None:
        if folder.parent.resolve() == checkpoints.resolve():
            return Candidates([checkpoints / folder.name], older=False, back=True)
        candidates = Candidates([folder], older=False)
    else:
        holds = folder if complete_steps(folder) else folder / "checkpoints"
        if holds.resolve() == checkpoints.resolve():
            return own
        candidates = Candidates([holds / name_of(step) for step in reversed(complete_steps(holds))])
    if own.paths:
        own.notes.append(BEGUN.format(folder))
        return own
    if not candidates.paths:
        raise InputError(
            f"checkpoint.resume: {folder} is no checkpoint and holds none: expected a folder "
            "step_0000100, a folder of "
            "such, or the folder of a run"
        )
    return candidates


def _has_no_problem(checkpoint: Path, manifest: Manifest, index: int) -> bool:
    return not list(problems_of(checkpoint, manifest, index))
