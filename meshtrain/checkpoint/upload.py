"""Upload of complete checkpoints to object storage (S3, GCS) by fsspec, in the background, and
download from there.

`URL/step_0000100/` gets the files, the manifest and, last, COMPLETE: a folder without it is no
checkpoint. Rank 0 uploads from the shared folder in a background thread; a failure is reported and
retried with the next checkpoint.
"""

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.directory import COMPLETE, complete_steps, name_of, read_manifest, step_of
from meshtrain.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest
from meshtrain.checkpoint.retention import Retention, steps_to_keep
from meshtrain.checkpoint.verify import problems_of
from meshtrain.errors import DamagedError, InputError, bytes_text
from meshtrain.job.object_storage import ObjectStorage
from meshtrain.job.storage import read_guarded, write_whole
from meshtrain.job.threads import NoThreadError, start_thread

# replaces COMPLETE: it is damaged, or a run resumed from an earlier step
ASIDE = f"{COMPLETE}.aside"
# files that name the run whose checkpoints they are
RUN = "RUN"  # in storage
RUN_HERE = ".run"  # in the run's folder
LAST_S = 300.0  # how long the end of a run waits for the last upload


class Uploads:
    """The checkpoints of a run in object storage, for rank 0. Methods may raise any error of the
    storage's client."""

    def __init__(self, url: str, keep: Retention) -> None:
        """Does not connect yet. Raises InputError: not a valid URL, or the package that it needs is
        not installed."""
        self.url = url
        self.notes: list[str] = []  # lines to print
        self.problem: str | None = None  # why the last attempt failed; None if it did not
        self.under_way: int | None = None  # the step whose checkpoint is being read now
        self._storage = ObjectStorage(url, key="checkpoint.upload")
        self._keep = keep
        self._evaluations: dict[int, dict[str, float]] = {}  # by step

        self._lock = threading.Lock()  # of the next two
        self._thread: threading.Thread | None = None
        self._again = False  # whether there is something to upload since the thread has looked

    # What storage has ---------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps of complete checkpoints in storage, ascending."""
        return [step for step in self._folders() if self._storage.exists(_path(step, COMPLETE))]

    def claim(self, folder: Path, *, adopt: bool) -> None:
        """InputError: storage has checkpoints of another run than that with this folder. `adopt`:
        those that it has are the run's, if its folder is new."""
        own = folder / RUN_HERE
        there = self._run_there()
        if not own.exists():
            run = secrets.token_hex(16)
            if there is not None and adopt and not complete_steps(folder):
                run = there
            write_whole(own, run)
        if there not in (None, read_guarded(own).decode()):
            raise InputError(
                f"checkpoint.upload: {self.url} holds {name_of(self.steps()[-1])} of another run "
                f"than {folder}: name a prefix of its own with checkpoint.upload=URL; if they are "
                f"of one run, remove {self.url}/{RUN}"
            )

    def _run_there(self) -> str | None:
        """None: storage has no checkpoints, or none of a run that has said so."""
        if not self._storage.exists(RUN) or not self.steps():
            return None
        return self._storage.read(RUN, 1000).decode(errors="replace")

    def _folders(self) -> list[int]:
        """The steps that have a folder, complete or not, ascending."""
        steps = [step_of(name) for name in self._storage.names()]
        return sorted(step for step in steps if step is not None)

    def _manifest(self, step: int) -> tuple[Manifest, str]:
        """The manifest of a complete checkpoint, and its text. Raises DamagedError,
        FileNotFoundError: not intact."""
        name = _path(step, MANIFEST)
        path = self._storage.path(name)
        text = self._storage.read(name, MAX_BYTES)
        if self._complete(step) != directory.complete_text(hashlib.sha256(text).hexdigest()):
            raise DamagedError(path, f"and {COMPLETE} do not fit together")
        manifest = Manifest.parse(text, path)
        if manifest.step != step:
            raise DamagedError(path, f"is that of step {manifest.step}")
        return manifest, text.decode()

    def _complete(self, step: int) -> str:
        return self._storage.read(_path(step, COMPLETE), 1000).decode(errors="replace")

    # Setting aside ------------------------------------------------------------------------------

    def set_aside_later(self, step: int) -> None:
        """Sets aside checkpoints of later steps than the one this run resumes from: those steps
        will be repeated."""
        for later in self.steps():
            if later > step:
                self._set_aside(later)
                self.notes.append(
                    f"{self.url}/{name_of(later)} is set aside: this run went on from before it"
                )

    def _set_aside(self, step: int) -> None:
        self._storage.rename(_path(step, COMPLETE), _path(step, ASIDE))

    # Downloading --------------------------------------------------------------------------------

    def fetch(self, step: int, folder: Path) -> Path:
        """Downloads a checkpoint into a run's folder, setting aside one of the same name there.
        Raises DamagedError or FileNotFoundError: it is not intact; then it is set aside in
        storage."""
        unfinished = directory.begin(folder, step)
        try:
            manifest, text = self._manifest(step)
            names = list(manifest.files)
            self._storage.get_files([(_path(step, name), unfinished / name) for name in names])
            for rank, name in enumerate(names):
                for problem in problems_of(unfinished, manifest, rank):
                    path = self._storage.path(_path(step, name))
                    raise DamagedError(path, problem.what, problem.tensor)
                with open(unfinished / name, "rb") as written:
                    os.fsync(written.fileno())
            return directory.finish(folder, step, text, self.notes.append)
        except BaseException as error:
            with suppress(OSError):
                directory.abandon(folder, step)
            if isinstance(error, DamagedError | FileNotFoundError):
                self._set_aside(step)
            raise

    # Uploading ----------------------------------------------------------------------------------

    def offer(self, folder: Path) -> None:
        """Starts uploading the folder's complete checkpoints that storage lacks, in the background.
        Does not wait."""
        with self._lock:
            self._again = True
            if self._thread is None:
                try:
                    self._thread = start_thread(self._run, folder, name="upload")
                except NoThreadError as error:
                    self._fail(error)

    def wait(self, limit_s: float = LAST_S) -> bool:
        """Waits up to `limit_s` until no upload is in progress; returns whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()

    def _run(self, folder: Path) -> None:
        """The thread: ends when nothing was offered since it has looked."""
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                self._bring_up_to_date(folder)
                self.problem = None
            except Exception as error:
                # Each client has error types of its own, and none may stop the run.
                self._fail(error)
            self.under_way = None

    def _fail(self, error: Exception) -> None:
        failed_before = self.problem is not None
        self.problem = f"{type(error).__name__}: {error}"
        if not failed_before:
            self.notes.append(
                f"warning: the upload to {self.url} failed: {self.problem}; it is tried again with "
                "each checkpoint, and not said again until one has come through"
            )

    def _bring_up_to_date(self, folder: Path) -> None:
        """Uploads what storage lacks, and deletes there what no rule keeps."""
        here = complete_steps(folder)
        if not here:
            return
        self.claim(folder, adopt=False)
        if self._run_there() is None:
            self._storage.write(RUN, read_guarded(folder / RUN_HERE))
        self.set_aside_later(here[-1])
        there = self.steps()
        evaluations = self._read_evaluations(folder, here, there)
        keep = steps_to_keep({*here, *there}, evaluations, self._keep)
        for step in reversed(here):  # the newest first
            if step in keep:
                self._upload_unless_deleted(folder / name_of(step), step, is_there=step in there)
        for step in self._folders():
            if step in keep or self._storage.exists(_path(step, ASIDE)):
                continue
            if step in there:
                # first, so that nobody takes half of it for a checkpoint
                self._storage.remove(_path(step, COMPLETE))
            self._storage.remove_folder(_path(step))

    def _read_evaluations(
        self, folder: Path, here: list[int], there: list[int]
    ) -> Mapping[int, Mapping[str, float]]:
        """The evaluations of all checkpoints, if a rule needs them; each manifest is read once."""
        if self._keep.keep_best:
            for step in {*here, *there} - self._evaluations.keys():
                self._evaluations[step] = {}
                # a damaged checkpoint cannot be the best one
                with suppress(InputError, FileNotFoundError):
                    if step in here:
                        manifest, _ = read_manifest(folder / name_of(step))
                    else:
                        manifest, _ = self._manifest(step)
                    self._evaluations[step] |= manifest.evaluation or {}
        return self._evaluations

    def _upload_unless_deleted(self, checkpoint: Path, step: int, *, is_there: bool) -> None:
        try:
            self._upload(checkpoint, step, is_there)
        except Exception:
            if (checkpoint / COMPLETE).exists():
                raise  # else it was deleted meanwhile

    def _upload(self, checkpoint: Path, step: int, is_there: bool) -> None:
        """Uploads a checkpoint, unless it `is_there` and is the same."""
        self.under_way = step
        start = time.perf_counter()
        manifest, digest = read_manifest(checkpoint)
        if is_there:
            if self._complete(step) == directory.complete_text(digest):
                return
            self._storage.remove(_path(step, COMPLETE))
        if self._storage.exists(_path(step, ASIDE)):
            self._storage.remove(_path(step, ASIDE))
        # COMPLETE comes when all others are there.
        for names in ([*manifest.files, MANIFEST], [COMPLETE]):
            self._storage.put_files([(checkpoint / name, _path(step, name)) for name in names])
        seconds = time.perf_counter() - start
        speed = f"{bytes_text(manifest.total_bytes)} in {seconds:.1f} s"
        self.notes.append(f"uploaded {checkpoint.name} to {self.url}: {speed}")


def _path(step: int, file: str | None = None) -> str:
    """The path of a checkpoint in storage, or of a file of it, below the URL."""
    folder = name_of(step)
    return folder if file is None else f"{folder}/{file}"
