"""Node-local checkpoints: each rank writes its file to a disk of its host first, and reads it from
there on resume.

`FOLDER/ID/rank_00003/step_0000100` holds the file of rank 3, the manifest of all files, and
COMPLETE. The ID is stored in the shared folder of the checkpoints: a run that starts in a fresh
folder finds nothing of an earlier run. The checksum of the manifest identifies a checkpoint, so
files of two checkpoints are never mixed.
"""

import errno
import shutil
import uuid
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.directory import check_files, complete_steps, name_of, read_manifest
from meshtrain.checkpoint.load import files_needed
from meshtrain.checkpoint.manifest import File, Manifest, file_of
from meshtrain.checkpoint.shard_file import write_shard
from meshtrain.checkpoint.staging import Snapshot
from meshtrain.errors import InputError
from meshtrain.job.process import Job
from meshtrain.job.storage import read_guarded, write_whole
from meshtrain.layout import Layout

ID = ".local_id"
KEPT = 2  # checkpoints kept per rank: a complete one stays while other hosts still write the next

Known = tuple[int, str]  # step of a checkpoint and sha256 of its manifest


class LocalDisk:
    """The local disk of this host, for one run. All ranks construct it together."""

    def __init__(self, root: Path, checkpoints: Path, job: Job) -> None:
        """Raises InputError or TrainingError on every rank: a folder cannot be used."""
        assert job.layout is not None
        self._rank = job.rank
        self._here = [rank for rank in range(job.world_size) if job.layout.host(rank) == job.host]
        self._folder = root / _run_id(checkpoints, job)
        self.own = self._of(job.rank)
        self._manifests: dict[Known, Manifest] = {}
        # step resumed from, if that checkpoint is on local disks only
        self.went_on_from: int | None = None
        with job.collective_check("opening the local disks"):
            try:
                self.own.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if error.errno in (errno.EIO, errno.EROFS):
                    raise  # a fault of this host, not of the config
                raise InputError(
                    f"checkpoint.local: {self.own} cannot be made ({error.strerror}): "
                    "name a folder on a disk of each host"
                ) from error

    def _of(self, rank: int) -> Path:
        return self._folder / Path(file_of(rank)).stem

    # Writing ------------------------------------------------------------------------------------

    def write(self, step: int, snapshot: Snapshot) -> File:
        """Writes this rank's file to disk. Raises OSError: it cannot be written."""
        path = directory.begin_local(self.own, step)
        return write_shard(path / file_of(self._rank), snapshot.tensors())

    def finish(self, step: int, manifest_text: str) -> None:
        """Makes this rank's file part of a checkpoint. Called when all ranks have written
        theirs."""
        if (self.own / name_of(step)).exists():
            directory.remove(self.own / name_of(step))
        directory.finish(self.own, step, manifest_text, only=file_of(self._rank))

    def abandon(self, step: int) -> None:
        with suppress(OSError):
            directory.abandon(self.own, step)

    def prune(self) -> None:
        """Deletes older checkpoints, and those of ranks that run on other hosts now."""
        for step in complete_steps(self.own)[:-KEPT]:
            directory.remove(self.own / name_of(step))
        if self._rank != self._here[0]:
            return  # one rank of the host looks after the others' folders
        folders_in_use = {self._of(rank) for rank in self._here}
        oldest = complete_steps(self.own)[0]
        for folder in set(self._folder.glob("rank_*")) - folders_in_use:
            steps = complete_steps(folder)
            # else that rank is active, and several hosts share this disk
            if steps and steps[-1] < oldest:
                shutil.rmtree(folder)

    def remove_later(self, step: int) -> None:
        """Deletes checkpoints of steps that will be repeated, and unfinished ones."""
        directory.clear_unfinished(self.own)
        for later in complete_steps(self.own):
            if later > step:
                directory.remove(self.own / name_of(later))

    # Reading ------------------------------------------------------------------------------------

    def inventory(self) -> dict[Known, dict[int, Path]]:
        """The checkpoints of which this host has files -> rank -> folder of its file. Contents are
        not checked."""
        by_known: dict[Known, dict[int, Path]] = {}
        for folder in self._folder.glob("rank_*"):
            steps: list[int] = []
            with suppress(OSError):  # a disk that cannot be read counts as empty
                steps = complete_steps(folder)
            for step in steps:
                # a damaged checkpoint counts as missing
                with suppress(InputError, OSError, ValueError, KeyError):
                    checkpoint = folder / name_of(step)
                    manifest, digest = read_manifest(checkpoint)
                    rank = int(folder.name.removeprefix("rank_"))
                    check_files(checkpoint, manifest, file_of(rank))
                    self._manifests[step, digest] = manifest
                    by_known.setdefault((step, digest), {})[rank] = checkpoint
        return by_known

    def offers(self, layout: Layout) -> list[Known]:
        """The checkpoints of which this host has every file that this rank needs on a layout."""
        offered = []
        for known, files in self.inventory().items():
            if self._needs(known, layout) <= files.keys():
                offered.append(known)
        return offered

    def _needs(self, known: Known, layout: Layout) -> set[int]:
        """The ranks whose files this rank needs of a checkpoint."""
        manifest = self._manifests[known]
        if not _deals_alike(manifest.layout, layout):
            # the placement on the new layout is not known yet
            return set(range(len(manifest.files)))
        return files_needed(manifest, manifest.tensors, layout, self._rank)


def _run_id(checkpoints: Path, job: Job) -> str:
    """The name of this run on all local disks, which its first job has drawn."""
    run_id = None
    with job.collective_check("looking at the local disks"):
        if job.rank == 0:
            path = checkpoints / ID
            if not path.exists():
                write_whole(path, uuid.uuid4().hex)
            run_id = read_guarded(path, 1000).decode()
    return str(job.reduce("looking at the local disks", run_id, itemgetter(0)))


def _deals_alike(a: Layout, b: Layout) -> bool:
    """Whether ranks hold the same parts of all tensors on both layouts."""
    return (a.sizes, a.experts, a.context_heads) == (b.sizes, b.experts, b.context_heads)
