"""Resume: the state a run starts from. One rank chooses, all agree on what they see, and each fills
its part.

1. *Choose*: rank 0 lists the candidates (candidates.py): those of the run's folder, those that only
   the hosts' local disks have, and those that object storage has (stored.py).
2. *Agree*: all ranks read the manifest of the first one, and compare digests. What one host finds
   damaged and another one reads is no damage of the checkpoint, but of the host (witness.py).
3. *Fill*: each rank reads its share, and the ranks exchange what they have read. If that shows
   damage, the next candidate is taken.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from meshtrain.checkpoint.candidates import Candidates, find_candidates, mark_going_back
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
from meshtrain.checkpoint.local import LocalDisk
from meshtrain.checkpoint.manifest import Manifest, file_of
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.state import State
from meshtrain.checkpoint.stored import StoredCheckpoints
from meshtrain.checkpoint.upload import Uploads
from meshtrain.checkpoint.verify import problems_of
from meshtrain.checkpoint.witness import fail_if_another_host_reads
from meshtrain.errors import DamagedError, InputError, MissingError, UnreadableError
from meshtrain.job.consistency import Fingerprint, require_equal
from meshtrain.job.process import Job
from meshtrain.job.storage import warn, with_retries

# Of the files that ranks have found damaged, how many another host is asked to read.
MOST_ASKED = 4


@dataclass(frozen=True)
class Choice:
    """What rank 0 has chosen; its fields travel to all ranks as JSON."""

    path: str | None = None  # of a checkpoint; None: the run starts at its first step
    problem: str | None = None  # what is wrong with its manifest, as rank 0 sees it; None: nothing
    back: bool = False  # the user asked to go back to one of the run's own checkpoints
    local_digest: str | None = None  # see `Candidate`


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that all ranks have agreed on."""

    path: Path  # on this host
    manifest: Manifest
    digest: str  # sha256 of the manifest
    # complete on the hosts' own disks, but not in the shared folder
    local_only: bool


@dataclass(frozen=True)
class Damage:
    """What a rank has found when it read its share."""

    problem: str
    file: str  # the name of the file


class Resume:
    """The checkpoint that a run resumes from, the same on all ranks."""

    def __init__(
        self,
        job: Job,
        spec: RunSpec,
        *,
        local: LocalDisk | None = None,
        uploads: Uploads | None = None,
    ) -> None:
        """Decides from the manifests alone.

        Args:
            local: local disk, to which checkpoints are written first.
            uploads: on rank 0: object storage that may have checkpoints.

        Raises InputError on every rank: no checkpoint is usable, or the configs differ.
        """
        self.local = local
        self.uploads = uploads
        self.back = False  # the user asked to go back to one of the run's own checkpoints
        self._job = job
        self._spec = spec
        self._chosen: Chosen | None = None  # None: the run starts at its first step

        # Filled on rank 0, which lists the candidates; the others have only notes of their own.
        self._candidates = Candidates()
        self._damaged: list[str] = []  # what was wrong with candidates that were passed over
        self._stored: StoredCheckpoints | None = None
        if uploads is not None:
            self._stored = StoredCheckpoints(uploads, spec, restarted=job.again)

        with job.collective_check("choosing a checkpoint"):
            if job.rank == 0:
                self._candidates = with_retries(lambda: find_candidates(spec, restarted=job.again))
                if self._stored is not None:
                    self._stored.claim()
        if local is not None:
            self._add_local(local)
        self._agree()

    @property
    def checkpoint(self) -> Path | None:
        """None: the run starts at its first step."""
        return None if self._chosen is None else self._chosen.path

    @property
    def step(self) -> int:
        """Updates already done when the run starts."""
        return 0 if self._chosen is None else self._chosen.manifest.step

    @property
    def own(self) -> bool:
        """Whether the checkpoint lies in this run's own folder, and not in another run's, or on
        local disks only."""
        return self._chosen is not None and self._is_own(self._chosen.path)

    @property
    def counters(self) -> dict[str, Any] | None:
        """The counters at the checkpoint; None if the run starts at its first step."""
        return None if self._chosen is None else counters_of(self._chosen.manifest)

    def about(self) -> Iterator[str]:
        """Lines for people."""
        yield from self._candidates.notes
        if self._chosen is None:
            return
        manifest = self._chosen.manifest
        yield f"goes on from {self.checkpoint}: step {self.step}, written {manifest.written}"
        changes = compare(manifest, self._spec, self._job)
        if changes.listed:
            yield "changed since that checkpoint: " + "; ".join(changes.listed)

    def restore(self, state: State) -> None:
        """Fills the state from the checkpoint; with `resume: latest`, from the next older one if
        that is damaged.

        Raises:
            InputError: on every rank: no candidate is left, or the checkpoint is not of this model.
            TrainingError: on every rank: a host cannot read files that another host can.
        """
        while self._chosen is not None:
            hosts, damages = self._fill(self._chosen, state)
            if not damages:
                break
            # Of a checkpoint on local disks each file is on one host, and no other one can read it.
            if not self._chosen.local_only:
                self._require_witnesses(self._chosen, hosts, damages)
            # Only now, when no other host could read it, the next candidate is taken.
            self._pass_over([damage.problem for damage in damages if damage is not None])
            self._agree()
        with self._job.collective_check("setting later checkpoints aside"):
            self._set_later_aside()

    # Choose -------------------------------------------------------------------------------------

    def _add_local(self, local: LocalDisk) -> None:
        """Adds checkpoints that are on local disks only, and complete over all hosts, to the run's
        own candidates."""
        assert self._job.layout is not None
        offers = self._job.reduce(
            "looking at the local disks", local.offers(self._job.layout), _count_offers
        )
        if self._job.rank == 0:
            self._candidates.add_local(local, offers, self._job.world_size, self._spec)

    def _choose(self) -> Choice:
        """On rank 0: the first candidate, and what is wrong with it, if anything is."""
        candidates = self._candidates
        if self._stored is not None:
            self._stored.bring_newer(candidates)
        # If the user names one checkpoint, an older one does not stand in for it.
        may_take_next = candidates.older or not self._damaged
        if not candidates.queue or not may_take_next:
            # A run whose checkpoints are all damaged does not begin anew by itself.
            if self._damaged:
                listed = "\n".join(f"  {line}" for line in self._damaged)
                raise InputError(
                    f"no checkpoint is whole that this run could go on from:\n{listed}\n"
                    f"To begin anew, name another folder with {self._spec.folder_option}, or move "
                    f"{self._spec.checkpoints} away"
                )
            return Choice(back=candidates.back)
        first = candidates.queue[0]
        problem = None
        # Of a checkpoint on local disks every rank has checked the manifest and its own files,
        # before it offered it.
        if first.local_digest is None:
            try:
                with_retries(lambda: open_manifest(first.path), MissingError)
            except DamagedError as error:
                problem = str(error)
        return Choice(
            path=str(first.path),
            problem=problem,
            back=candidates.back,
            local_digest=first.local_digest,
        )

    def _pass_over(self, problems: list[str]) -> None:
        """On rank 0: drops the first candidate, which is damaged."""
        if self._job.rank == 0:
            self._damaged += dict.fromkeys(problems)
            self._candidates.queue.pop(0)

    # Agree --------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Takes the first candidate whose manifest is intact, the same one on all ranks."""
        while True:
            choice, hosts = self._share_choice()
            if choice.path is None or choice.problem is None:
                break
            # Only rank 0's host has looked at the manifest so far.
            look = partial(open_manifest, Path(choice.path))
            fail_if_another_host_reads(self._job, hosts, {hosts[0]}, choice.problem, look)
            self._pass_over([choice.problem])
        self.back = choice.back
        self._chosen = None
        if choice.path is not None:
            self._chosen = self._open(Path(choice.path), choice.local_digest)

    def _share_choice(self) -> tuple[Choice, list[str]]:
        """Rank 0's choice; if it has a problem, also the host of each rank."""
        choice = Choice()
        with self._job.collective_check("choosing a checkpoint"):
            if self._job.rank == 0:
                choice = self._choose()
        report = [self._job.host, asdict(choice)]
        fields, hosts = self._job.reduce("choosing a checkpoint", report, _choice_of_rank_0)
        return Choice(**fields), hosts

    def _open(self, path: Path, local_digest: str | None) -> Chosen:
        """Reads the manifest on every rank; raises if they see different ones, or if it does not
        belong to this run's config. `path`: as rank 0 sees it."""
        with self._job.collective_check(f"reading the manifest of {path}"):
            own_path = path  # as this host sees it
            if local_digest is not None and self.local is not None:
                # On this host's disk each of its ranks has a folder, with the same manifest.
                step = step_of(path.name) or 0
                folders = self.local.inventory()[step, local_digest]
                own_path = next(iter(folders.values()))
            manifest, digest = self._read_manifest(own_path)
        seen = Fingerprint(
            f"the manifest of {path}",
            {"digest": digest},
            "all hosts have to see the same folder",
        )
        require_equal(self._job, seen)
        with self._job.collective_check("comparing the checkpoint with the config"):
            if self._job.rank == 0:
                check(manifest, self._spec, self._job, own_path)
        return Chosen(own_path, manifest, digest, local_only=local_digest is not None)

    def _read_manifest(self, checkpoint: Path) -> tuple[Manifest, str]:
        """The manifest of the chosen checkpoint and its digest, without looking at the other files.
        Raises InputError or UnreadableError: this rank cannot read it."""
        # A file that rank 0 sees may appear a little later on other hosts.
        retried = () if self._job.rank == 0 else (InputError,)
        try:
            return with_retries(lambda: read_manifest(checkpoint), *retried)
        except InputError as error:
            # Locking the run's own folder has shown that all hosts see it: what one host cannot
            # read there is that host's fault, and not the user's.
            if self._job.rank > 0 and self._is_own(checkpoint):
                raise UnreadableError(checkpoint, f"{error}, and rank 0 has read it") from error
            raise

    def _is_own(self, checkpoint: Path) -> bool:
        return checkpoint.parent.resolve() == self._spec.checkpoints.resolve()

    # Fill ---------------------------------------------------------------------------------------

    def _fill(self, chosen: Chosen, state: State) -> tuple[list[str], list[Damage | None]]:
        """Fills the state, unless a rank finds damage; returns the host of each rank, and what it
        has found. Both are empty if no rank has found any."""
        damage = None
        folders: Mapping[int, Path] = {}
        with self._job.collective_check(f"loading {chosen.path}"):
            try:
                sources = self._sources(chosen, state)
                # A file that this host alone does not see may appear a little later.
                read = partial(self._read, chosen, state, sources)
                folders = with_retries(read, MissingError)
            except DamagedError as error:
                damage = Damage(str(error), error.file.name)
            except UnreadableError as error:
                if not chosen.local_only:
                    raise
                # A local disk that stays unreadable counts as damaged: an older checkpoint may do.
                damage = Damage(str(error), error.file.name)
        report = [self._job.host, None if damage is None else asdict(damage)]
        reports = self._job.reduce("loading", report, _if_any_is_damaged)
        if not reports:
            # The ranks exchange what they have read only if all have: one without its part could
            # not take part in the collectives.
            exchange(state)
            if self.local is not None:
                # `_sources` gives folders for the local disk alone.
                is_local = bool(folders)
                count = self._job.reduce("loading", is_local, sum)
                self._candidates.notes.append(
                    f"{count} of {self._job.world_size} ranks read from their local disks"
                )
        hosts = [host for host, _ in reports]
        damages = [None if fields is None else Damage(**fields) for _, fields in reports]
        return hosts, damages

    def _sources(self, chosen: Chosen, state: State) -> list[Mapping[int, Path]]:
        """Where this rank may read its files, in order of preference.

        A checkpoint has one file for each rank of the job that wrote it. A source maps such ranks
        to the folders that have their files; those that it leaves out are in the shared folder.

        Raises MissingError: the checkpoint is on local disks only, and some files are not.
        """
        in_shared_folder: Mapping[int, Path] = {}
        if self.local is None:
            return [in_shared_folder]
        manifest = chosen.manifest
        # On another layout this rank needs parts of several files.
        on_local_disk = self.local.inventory().get((manifest.step, chosen.digest), {})
        needed = files_needed(manifest, state.placements, state.layout, self._job.rank)
        missing = needed - on_local_disk.keys()
        if chosen.local_only:
            if missing:
                folder = self.local.own / name_of(manifest.step)
                raise MissingError(folder / file_of(min(missing)))
            return [on_local_disk]
        return [in_shared_folder] if missing else [on_local_disk, in_shared_folder]

    def _read(
        self, chosen: Chosen, state: State, sources: list[Mapping[int, Path]]
    ) -> Mapping[int, Path]:
        """Reads from the first source that is intact, and returns it. Removes those before it from
        the list, so that a retry of the whole does not begin with them."""
        while True:
            try:
                read_shares(chosen.path, chosen.manifest, state, sources[0])
                return sources[0]
            except (DamagedError, OSError) as error:
                if len(sources) == 1:
                    raise
                warn(f"on host {self._job.host}: {error}; the shared folder is read instead")
                sources.pop(0)

    def _require_witnesses(
        self, chosen: Chosen, hosts: list[str], damages: list[Damage | None]
    ) -> None:
        """Raises TrainingError if another host can read a file that some ranks found damaged."""
        problems = {damage.file: damage.problem for damage in damages if damage is not None}
        names = [file_of(rank) for rank in range(len(chosen.manifest.files))]
        for name, problem in list(problems.items())[:MOST_ASKED]:
            # The hosts that cannot read it.
            blind = set()
            for host, damage in zip(hosts, damages, strict=True):
                if damage is not None and damage.file == name:
                    blind.add(host)
            look = partial(_is_intact, chosen.path, chosen.manifest, names.index(name))
            fail_if_another_host_reads(self._job, hosts, blind, problem, look)

    # Afterwards ---------------------------------------------------------------------------------

    def _set_later_aside(self) -> None:
        """Sets aside the run's own checkpoints of later steps, which would be taken for newer
        ones: on local disks by each rank, and in the shared folder and in storage by rank 0."""
        if self.local is not None:
            self.local.remove_later(self.step)
            # The local disks need not write this checkpoint again when it is saved in the shared
            # folder.
            is_local_only = self._chosen is not None and self._chosen.local_only
            self.local.went_on_from = self.step if is_local_only else None
        if self._job.rank != 0:
            return
        notes = self._candidates.notes
        if self._stored is not None:
            self._stored.set_aside_later(self.step, notes)
        notes += [f"damaged: {line}" for line in self._damaged]
        for step in complete_steps(self._spec.checkpoints):
            if step > self.step:
                path = self._spec.checkpoints / name_of(step)
                notes.append(f"{path} is set aside as {set_aside(path).name}")
        if self.back:
            mark_going_back(self._spec)


def _count_offers(offers: list[list[list]]) -> list[tuple[int, str, int]]:
    """Of every offered checkpoint: step, digest, and the number of ranks that offer it;
    ascending."""
    counts: Counter[tuple[int, str]] = Counter()
    for of_rank in offers:
        for step, digest in of_rank:
            counts[step, digest] += 1
    return sorted((step, digest, ranks) for (step, digest), ranks in counts.items())


def _choice_of_rank_0(reports: list[list[Any]]) -> tuple[dict[str, Any], list[str]]:
    """From [host, choice] of every rank: rank 0's choice, and if another host has to be asked about
    it, the host of each rank: in a large job that list is long."""
    choice = reports[0][1]
    hosts = [host for host, _ in reports] if choice["problem"] is not None else []
    return choice, hosts


def _if_any_is_damaged(reports: list[list[Any]]) -> list[list[Any]]:
    """All reports, [host, damage] of every rank; without any damage no rank needs them."""
    has_damage = any(damage is not None for _, damage in reports)
    return reports if has_damage else []


def _is_intact(checkpoint: Path, manifest: Manifest, rank: int) -> bool:
    return not list(problems_of(checkpoint, manifest, rank))
