"""Upload of complete checkpoints to object storage (S3, GCS) by fsspec, in the background, and
download from there.

`URL/step_0000100/` gets the files, the manifest and, last, COMPLETE: a folder without it is no
checkpoint. Rank 0 uploads from the shared folder in a background thread; a failure is reported and
retried with the next checkpoint.
"""

import asyncio
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import directory
from meshtrain.checkpoint.directory import COMPLETE, complete_steps, name_of, read_manifest, step_of
from meshtrain.checkpoint.manifest import MANIFEST, MAX_BYTES, Manifest
from meshtrain.checkpoint.retention import Retention, steps_to_keep
from meshtrain.checkpoint.verify import problems_of
from meshtrain.errors import DamagedError, InputError, bytes_text
from meshtrain.job.pending import advance
from meshtrain.job.storage import read_guarded, write_whole

# replaces COMPLETE: it is damaged, or a run resumed from an earlier step
ASIDE = f"{COMPLETE}.aside"
# files that name the run whose checkpoints they are: in storage, in the run's folder
RUN, RUN_HERE = (
    "RUN",
    ".run",
)
AT_ONCE = 8  # files in transfer at once
LAST_S = 300.0  # how long the end of a run waits for the last upload
# Some clients wait forever for some answers. A call is given up after:
ANSWER_S = 100.0
# without any part of a file transferred; some clients have 4 GB of parts in flight
SILENCE_S = 600.0


class Uploads:
    """The checkpoints of a run in object storage, for rank 0. Methods may raise any error of the
    storage's client."""

    def __init__(self, url: str, keep: Retention) -> None:
        """Does not connect yet. Raises InputError: not a valid URL, or the package that it needs is
        not installed."""
        from fsspec.core import url_to_fs

        folder = {"auto_mkdir": True} if url.startswith("file:") or "://" not in url else {}
        try:
            self._storage, self._root = url_to_fs(url, use_listings_cache=False, **folder)
        except ImportError as error:
            raise InputError(
                f"checkpoint.upload: {url} needs a package that is not installed ({error}): "
                "pip install 'meshtrain[s3]', or 'meshtrain[gcs]'"
            ) from error
        except Exception as error:  # each client has error types of its own
            raise InputError(
                f"checkpoint.upload: {url}: {error}; expected such as s3://bucket/prefix"
            ) from error
        self.url, self.notes = url, list[str]()  # lines to print
        self.problem: str | None = None  # why the last attempt failed; None if it did not
        self.under_way: int | None = None  # the step whose checkpoint is being read now
        self._keep, self._evaluations = keep, dict[int, dict[str, float]]()
        self._lock, self._again = threading.Lock(), False
        self._thread: threading.Thread | None = None

    def steps(self) -> list[int]:
        """The steps of complete checkpoints in storage, ascending."""
        return [
            step for step in self._folders() if self._call("exists", self._path(step, COMPLETE))
        ]

    def claim(self, folder: Path, *, adopt: bool) -> None:
        """InputError: storage has checkpoints of another run than that with this folder. `adopt`:
        those that it has are the run's, if its folder is new."""
        own, there = folder / RUN_HERE, self._run_there()
        if not own.exists() and there is not None and adopt and not complete_steps(folder):
            write_whole(own, there)
        if not own.exists():
            write_whole(own, secrets.token_hex(16))
        if there not in (None, read_guarded(own).decode()):
            raise InputError(
                f"checkpoint.upload: {self.url} holds {name_of(self.steps()[-1])} of another run "
                f"than {folder}: name a "
                "prefix of its own with checkpoint.upload=URL; if they are of one run, remove "
                f"{self.url}/{RUN}"
            )

    def _run_there(self) -> str | None:
        """None: storage has no checkpoints, or none of a run that has said so."""
        path = f"{self._root}/{RUN}"
        has_one = self._call("exists", path) and self.steps()
        return self._read(path, 1000).decode(errors="replace") if has_one else None

    def set_aside_later(self, step: int) -> None:
        """Sets aside checkpoints of later steps than the one this run resumes from: those steps
        will be repeated."""
        for later in self.steps():
            if later > step:
                self._set_aside(later)
                self.notes.append(
                    f"{self.url}/{name_of(later)} is set aside: this run went on from before it"
                )

    def offer(self, folder: Path) -> None:
        """Starts uploading the folder's complete checkpoints that storage lacks, in the background.
        Does not wait."""
        with self._lock:
            self._again = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(folder,), name="upload", daemon=True
                )
                self._thread.start()

    def wait(self, limit_s: float = LAST_S) -> bool:
        """Waits up to `limit_s` until no upload is in progress; returns whether that is so."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()

    def fetch(self, step: int, folder: Path) -> Path:
        """Downloads a checkpoint into a run's folder, setting aside one of the same name there.
        Raises DamagedError or FileNotFoundError: it is not intact; then it is set aside in
        storage."""
        unfinished = directory.begin(folder, step)
        try:
            manifest, text = self._manifest(step)
            names = list(manifest.files)
            self._transfer(
                "get_file", [(self._path(step, name), str(unfinished / name)) for name in names]
            )
            for rank, name in enumerate(names):
                for problem in problems_of(unfinished, manifest, rank):
                    raise DamagedError(Path(self._path(step, name)), problem.what, problem.tensor)
                with open(unfinished / name, "rb") as written:
                    os.fsync(written.fileno())
            return directory.finish(folder, step, text, self.notes.append)
        except BaseException as error:
            with suppress(OSError):
                directory.abandon(folder, step)
            if isinstance(error, DamagedError | FileNotFoundError):
                self._set_aside(step)
            raise

    def _run(self, folder: Path) -> None:
        while True:
            with self._lock:
                if not self._again:
                    self._thread = None
                    return
                self._again = False
            try:
                self._bring_up_to_date(folder)
                self.problem = None
            except (
                Exception
            ) as error:  # each client has error types of its own, and none may stop the run
                failed_before, self.problem = (
                    self.problem is not None,
                    f"{type(error).__name__}: {error}",
                )
                if not failed_before:
                    self.notes.append(
                        f"warning: the upload to {self.url} failed: {self.problem}; it is tried "
                        "again with each "
                        "checkpoint, and not said again until one has come through"
                    )
            self.under_way = None

    def _bring_up_to_date(self, folder: Path) -> None:
        here = complete_steps(folder)
        if not here:
            return
        self.claim(folder, adopt=False)
        if self._run_there() is None:
            self._call("pipe_file", f"{self._root}/{RUN}", read_guarded(folder / RUN_HERE))
        self.set_aside_later(here[-1])
        there = self.steps()
        for step in {*here, *there} - self._evaluations.keys() if self._keep.keep_best else ():
            self._evaluations[step] = {}
            # a damaged checkpoint cannot be the best one
            with suppress(InputError, FileNotFoundError):
                manifest, _ = (
                    read_manifest(folder / name_of(step)) if step in here else self._manifest(step)
                )
                self._evaluations[step] |= manifest.evaluation or {}
        keep = steps_to_keep({*here, *there}, self._evaluations, self._keep)
        for step in reversed(here):  # the newest first
            if step in keep:
                try:
                    self._upload(folder / name_of(step), step, step in there)
                except Exception:
                    if (folder / name_of(step) / COMPLETE).exists():
                        raise  # else it was deleted meanwhile
        for step in self._folders():
            if step not in keep and not self._call("exists", self._path(step, ASIDE)):
                if step in there:
                    self._call("rm_file", self._path(step, COMPLETE))
                self._call("rm", self._path(step), recursive=True)

    def _upload(self, checkpoint: Path, step: int, is_there: bool) -> None:
        self.under_way, start = step, time.perf_counter()
        manifest, digest = read_manifest(checkpoint)
        if is_there:
            if self._complete(step) == directory.complete_text(digest):
                return
            self._call("rm_file", self._path(step, COMPLETE))
        if self._call("exists", self._path(step, ASIDE)):
            self._call("rm_file", self._path(step, ASIDE))
        for names in ([*manifest.files, MANIFEST], [COMPLETE]):
            self._transfer(
                "put_file", [(str(checkpoint / name), self._path(step, name)) for name in names]
            )
        speed = f"{bytes_text(manifest.total_bytes)} in {time.perf_counter() - start:.1f} s"
        self.notes.append(f"uploaded {checkpoint.name} to {self.url}: {speed}")

    def _set_aside(self, step: int) -> None:
        self._call("cp_file", self._path(step, COMPLETE), self._path(step, ASIDE))
        self._call("rm_file", self._path(step, COMPLETE))

    def _manifest(self, step: int) -> tuple[Manifest, str]:
        """The manifest of a complete checkpoint, and its text. Raises DamagedError,
        FileNotFoundError: not intact."""
        path = Path(self._path(step, MANIFEST))
        text = self._read(str(path), MAX_BYTES)
        if self._complete(step) != directory.complete_text(hashlib.sha256(text).hexdigest()):
            raise DamagedError(path, f"and {COMPLETE} do not fit together")
        manifest = Manifest.parse(text, path)
        if manifest.step != step:
            raise DamagedError(path, f"is that of step {manifest.step}")
        return manifest, text.decode()

    def _complete(self, step: int) -> str:
        return self._read(self._path(step, COMPLETE), 1000).decode(errors="replace")

    def _read(self, path: str, most: int) -> bytes:
        # not by reading a range: some servers refuse one beyond the end
        if self._call("size", path) > most:
            raise DamagedError(Path(path), f"is larger than {bytes_text(most)}")
        return self._call("cat_file", path)

    def _folders(self) -> list[int]:
        try:
            names: list[Any] = self._call("ls", self._root, detail=False)
        except FileNotFoundError:
            return []
        steps = [step_of(name.rstrip("/").rpartition("/")[2]) for name in names]
        return sorted(step for step in steps if step is not None)

    def _transfer(self, name: str, pairs: Iterable[tuple[str, str]]) -> None:
        """`put_file` or `get_file` for (source, target) pairs of paths. Raises TimeoutError as
        `_call`."""
        if not self._storage.async_impl:
            for source, target in pairs:
                getattr(self._storage, name)(source, target)
            return
        from fsspec.callbacks import Callback

        last, slots = [time.monotonic()], asyncio.Semaphore(AT_ONCE)

        def moved(*_: Any, **__: Any) -> None:
            last[0] = time.monotonic()
            advance()

        callback = Callback(hooks={"moved": moved})

        async def transfer(source: str, target: str) -> None:
            async with slots:
                await getattr(self._storage, f"_{name}")(source, target, callback=callback)

        async def transfer_all() -> None:
            try:
                async with asyncio.TaskGroup() as tasks:  # if one fails, all others are cancelled
                    for pair in pairs:
                        tasks.create_task(transfer(*pair))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

        self._wait(transfer_all(), SILENCE_S, last)

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """The result of a storage method. Raises TimeoutError: the call was given up. Synchronous
        clients (of local folders) have no time limit."""
        if not self._storage.async_impl:
            return getattr(self._storage, name)(*arguments, **options)
        return self._wait(
            getattr(self._storage, f"_{name}")(*arguments, **options), ANSWER_S, [time.monotonic()]
        )

    def _wait(self, answer: Coroutine[Any, Any, Any], limit_s: float, last: Sequence[float]) -> Any:
        """The answer; waits for it until `limit_s` after the time in `last`, when something was
        last transferred."""
        call = asyncio.run_coroutine_threadsafe(answer, self._storage.loop)
        while (left_s := last[0] + limit_s - time.monotonic()) > 0:
            with suppress(TimeoutError):
                call.exception(left_s)
            if call.done():
                return call.result()
        call.cancel()  # else it holds a connection
        raise TimeoutError(f"no answer for {limit_s:.0f} s")

    def _path(self, step: int, file: str = "") -> str:
        return f"{self._root}/{name_of(step)}/{file}".rstrip("/")
