"""Object storage: the few calls of an fsspec client that a run needs, each with a time limit.

Paths are below the URL. Clients have error types of their own, and any of these may be raised.
Synchronous clients (of local folders) have no time limit.
"""

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshtrain.errors import DamagedError, InputError, bytes_text
from meshtrain.job.pending import advance

AT_ONCE = 8  # files in transfer at once
# Some clients wait forever for some answers. A call is given up after:
ANSWER_S = 100.0
# without any part of a file transferred; some clients have 4 GB of parts in flight
SILENCE_S = 600.0


class ObjectStorage:
    """A folder in object storage."""

    def __init__(self, url: str, *, key: str) -> None:
        """Does not connect yet. `key`: of the config, that has the URL. Raises InputError: not a
        valid URL, or the package that it needs is not installed."""
        from fsspec.core import url_to_fs

        # gcsfs would ask by gRPC what kind of bucket it is. gRPC does not survive a fork: workers
        # that read data, forked from a process that has used it, hang or crash.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        options = {}
        if url.startswith("file:") or "://" not in url:
            options["auto_mkdir"] = True
        try:
            self._client, self._root = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            raise InputError(
                f"{key}: {url} needs a package that is not installed ({error}): "
                "pip install 'meshtrain[s3]', or 'meshtrain[gcs]'"
            ) from error
        except Exception as error:  # each client has error types of its own
            raise InputError(
                f"{key}: {url}: {error}; expected such as s3://bucket/prefix"
            ) from error

    def path(self, name: str) -> Path:
        """A path for messages."""
        return Path(self._full(name))

    def names(self) -> list[str]:
        """The names of folders and files; none if there is nothing yet."""
        try:
            paths: list[str] = self._call("ls", self._root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def exists(self, name: str) -> bool:
        return self._call("exists", self._full(name))

    def read(self, name: str, most: int) -> bytes:
        """Raises DamagedError: it has more than `most` bytes; FileNotFoundError."""
        path = self._full(name)
        # not by reading a range: some servers refuse one beyond the end
        if self._call("size", path) > most:
            raise DamagedError(Path(path), f"is larger than {bytes_text(most)}")
        return self._call("cat_file", path)

    def size(self, name: str) -> int:
        """The bytes of a file. Raises FileNotFoundError."""
        return self._call("size", self._full(name))

    def read_ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes [begin, end) of a file, for several such spans at once."""
        starts = [begin for begin, _ in spans]
        ends = [end for _, end in spans]
        parts = self._call("cat_ranges", [self._full(name)] * len(spans), starts, ends)
        for part in parts:
            if isinstance(part, Exception):
                raise part
        return parts

    def write(self, name: str, content: bytes) -> None:
        self._call("pipe_file", self._full(name), content)

    def rename(self, old: str, new: str) -> None:
        """By copying: object storage has no renaming."""
        self._call("cp_file", self._full(old), self._full(new))
        self._call("rm_file", self._full(old))

    def remove(self, name: str) -> None:
        self._call("rm_file", self._full(name))

    def remove_folder(self, name: str) -> None:
        self._call("rm", self._full(name), recursive=True)

    def put_files(self, pairs: Iterable[tuple[Path, str]]) -> None:
        """Uploads several files, (source, target) each."""
        paths = [(str(source), self._full(target)) for source, target in pairs]
        self._transfer("put_file", paths)

    def get_files(self, pairs: Iterable[tuple[str, Path]]) -> None:
        """Downloads several files, (source, target) each."""
        paths = [(self._full(source), str(target)) for source, target in pairs]
        self._transfer("get_file", paths)

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a client's method. Raises TimeoutError: the call was given up."""
        if not self._client.async_impl:
            return getattr(self._client, method)(*arguments, **options)
        # The coroutine behind the method: the method itself would wait without a limit.
        answer = getattr(self._client, f"_{method}")(*arguments, **options)
        return self._wait(answer, ANSWER_S, [time.monotonic()])

    def _transfer(self, method: str, pairs: Sequence[tuple[str, str]]) -> None:
        """`put_file` or `get_file` for (source, target) pairs of paths. Raises TimeoutError: the
        transfer was given up."""
        if not self._client.async_impl:
            for source, target in pairs:
                getattr(self._client, method)(source, target)
            return
        from fsspec.callbacks import Callback

        last_moved = [time.monotonic()]
        slots = asyncio.Semaphore(AT_ONCE)

        def moved(*_: Any, **__: Any) -> None:
            last_moved[0] = time.monotonic()
            advance()

        callback = Callback(hooks={"moved": moved})

        async def transfer(source: str, target: str) -> None:
            async with slots:
                await getattr(self._client, f"_{method}")(source, target, callback=callback)

        async def transfer_all() -> None:
            try:
                async with asyncio.TaskGroup() as tasks:  # if one fails, all others are cancelled
                    for source, target in pairs:
                        tasks.create_task(transfer(source, target))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None

        self._wait(transfer_all(), SILENCE_S, last_moved)

    def _wait(self, answer: Coroutine[Any, Any, Any], limit_s: float, last: Sequence[float]) -> Any:
        """The answer; waits for it until `limit_s` after the time in `last`, when something was
        last transferred."""
        call = asyncio.run_coroutine_threadsafe(answer, self._client.loop)
        while True:
            left_s = last[0] + limit_s - time.monotonic()
            if left_s <= 0:
                break
            with suppress(TimeoutError):
                call.exception(left_s)
            if call.done():
                return call.result()
        call.cancel()  # else it holds a connection
        raise TimeoutError(f"no answer for {limit_s:.0f} s")
