"""Names on the Hugging Face hub in the place of a path: `org/name`, or `org/name@revision`.

A name is asked for once, and stands for one commit from then on, as `org/name@COMMIT`: a branch may
move while a run is restarted. Its files are fetched by huggingface_hub, into its cache and by its
environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Only files that are named
here are fetched, and none is run.
"""

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from meshtrain.errors import InputError, UnreadableError, bytes_text, shorten
from meshtrain.job.pending import advance
from meshtrain.job.storage import warn

Kind = Literal["model", "dataset"]
Say = Callable[[str], None]

INSTALL = "pip install 'meshtrain[hub]'"
# as the hub takes them; a revision is a branch, a tag, a commit, or such as refs/pr/1
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@(\w[\w./-]{{0,199}}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# endings of files, which no repository is called by
_FILES = (".json", ".jsonl", ".safetensors", ".bin", ".pt", ".pth", ".yaml", ".py", ".txt")
_RUNS = "runs"  # where runs are unless a config says otherwise (`train.output`)
_AT_ONCE = 4  # files that are fetched at the same time
_SAY_EVERY_S = 10.0
_ANSWER_S = 20.0  # that the hub has for an answer
# what another try does not mend
_OWN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, and which revision of it; None: its main branch."""

    kind: Kind
    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        """As the hub writes it: data sets are told from models by their prefix."""
        prefix = "datasets/" if self.kind == "dataset" else ""
        suffix = "" if self.revision is None else f"@{self.revision}"
        return f"{prefix}{self.repo}{suffix}"

    @classmethod
    def parsed(cls, text: str) -> "HubName":
        """The name with this `str`."""
        kind: Kind = "dataset" if text.startswith("datasets/") else "model"
        repo, _, revision = text.removeprefix("datasets/").partition("@")
        return cls(kind, repo, revision or None)

    @property
    def is_commit(self) -> bool:
        """Whether it stands for the same files for ever."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> "HubName":
        return HubName(self.kind, self.repo, commit)


@dataclass(frozen=True)
class HubAnswer:
    """What the hub, or its cache, says of a name. Its fields travel to all ranks as JSON."""

    commit: str = ""
    files: tuple[str, ...] = ()
    problem: str = ""  # why there is no commit, and what to do, as the end of a sentence

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(self.files))  # a list, from JSON


def hub_name(text: str, kind: Kind = "model") -> HubName | None:
    """The repository that a value names; None: it is a path.

    What lies on this disk comes first. Without a revision `here/first` is a path too where there is
    a folder `here`, and so is a run's folder: who mistypes it must not get a stranger's files.
    """
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(_FILES) or ".." in text or "--" in match[1]:
        return None
    repo, revision = match.groups()
    if Path(text).exists():
        return None
    owner = repo.partition("/")[0]
    if revision is None and (owner == _RUNS or Path(owner).is_dir()):
        return None
    return HubName(kind, repo, revision)


@lru_cache(maxsize=64)  # a search reads a config again and again
def ask(name: HubName, texts: tuple[str, ...] = ()) -> HubAnswer:
    """Which commit a name stands for now, and which files that has. Those of `texts` that it has
    are fetched: they are small. Without an answer the cache counts, as offline."""
    try:
        answer = _ask(name)
        if texts:
            wanted = [file for file in texts if file in answer.files]
            fetch(name.at(answer.commit), wanted)
    except InputError as error:
        return HubAnswer(problem=str(error))
    except (OSError, ValueError) as error:
        return HubAnswer(problem=f"{name} cannot be fetched: {error}")
    return answer


def _ask(name: HubName) -> HubAnswer:
    """Raises InputError: there is no such repository, or it cannot be reached."""
    package = _package()
    if package.constants.HF_HUB_OFFLINE:
        cached = _cached(name)
        if cached is None:
            raise InputError(_not_whole(name))
        return cached
    try:
        with explained(name):
            info = package.HfApi().repo_info(
                name.repo, repo_type=name.kind, revision=name.revision, timeout=_ANSWER_S
            )
            files = [file.rfilename for file in info.siblings or ()]
    except UnreadableError as error:
        cached = _cached(name)
        if cached is None:
            raise InputError(
                f"{error.reason}: export HF_ENDPOINT if there is a mirror, or fetch it where there "
                f"is a network ({_command(name)}) and export HF_HUB_OFFLINE=1"
            ) from None
        warn(f"{error.reason}: {name} is taken as it lies in the cache, {cached.commit[:12]}")
        return cached
    _keep_commit(name, str(info.sha))
    return HubAnswer(str(info.sha), tuple(sorted(files)))


def _cached(name: HubName) -> HubAnswer | None:
    """What the cache knows of a name; None: nothing."""
    commit = name.revision or "main"
    if not name.is_commit:
        try:
            commit = (_cache(name) / "refs" / commit).read_text().strip()
        except OSError:
            return None
    folder = _snapshot(name.at(commit))
    if not folder.is_dir():
        return None
    files = [path for path in folder.rglob("*") if path.is_file()]
    return HubAnswer(commit, tuple(sorted(path.relative_to(folder).as_posix() for path in files)))


def _keep_commit(name: HubName, commit: str) -> None:
    """Notes in the cache for which commit a name stands, where huggingface_hub does when it fetches
    a file by that name: offline it is known then."""
    if name.is_commit:
        return
    file = _cache(name) / "refs" / (name.revision or "main")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    except OSError as error:
        warn(f"{file} could not be written ({error.strerror}): offline {name} will not be known")


def fetch(name: HubName, files: Sequence[str], say: Say | None = None) -> Path:
    """Brings files of a commit into the cache, unless they are there, and returns the folder in
    which they lie. `say` gets a line every 10 s.

    Raises InputError: this user may not read them; UnreadableError: the network failed, and what
    has come so far stays; OSError: the disk failed.
    """
    folder = _snapshot(name)
    missing = [file for file in files if not (folder / file).is_file()]
    if not missing:
        return folder
    package = _package()
    if package.constants.HF_HUB_OFFLINE:
        raise InputError(f"{_not_whole(name)} ({missing[0]} is missing)")

    def bring(file: str) -> None:
        with explained(name):
            package.hf_hub_download(name.repo, file, repo_type=name.kind, revision=name.revision)

    blobs = _cache(name) / "blobs"
    with watched(name, [blobs], say), _without_bars(package), ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(bring, missing):
            pass
    return folder


def local_path(text: str | Path, kind: Kind = "model") -> Path:
    """Where the files of a value lie: the path itself, or the folder of a name with its commit in
    the hub's cache, which need not be there. Raises InputError: huggingface_hub is not
    installed."""
    name = hub_name(str(text), kind)
    if name is None or not name.is_commit:
        return Path(text).expanduser()
    return _snapshot(name)


def _package() -> Any:
    """huggingface_hub, imported only where a config has a name."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise InputError(
            f"a name on the hub needs the package huggingface_hub ({error}): {INSTALL}"
        ) from None
    return huggingface_hub


def _cache(name: HubName) -> Path:
    folder = f"{name.kind}s--{name.repo.replace('/', '--')}"
    return Path(_package().constants.HF_HUB_CACHE) / folder


def _snapshot(name: HubName) -> Path:
    """The folder of a commit in the cache."""
    return _cache(name) / "snapshots" / str(name.revision)


def _command(name: HubName) -> str:
    """The command that fetches a repository."""
    if name.kind == "dataset":  # from files that `hf download` gets `datasets` makes others
        return "meshtrain prepare CONFIG"
    revision = "" if name.revision is None else f" --revision {name.revision}"
    return f"hf download {name.repo}{revision}"


def _not_whole(name: HubName) -> str:
    return (
        f"{name} is not whole in the cache ({_cache(name)}), and HF_HUB_OFFLINE says that nothing "
        f"is fetched: fetch it where there is a network ({_command(name)})"
    )


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Turns what huggingface_hub raises into an InputError with what to do, or an UnreadableError,
    which another try may mend."""
    package = _package()
    errors = package.errors
    endpoint = package.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        problem = (
            f"{name} is gated: ask for access at {endpoint}/{name.repo}, and export HF_TOKEN with "
            "a token of the account that has it"
        )
    except errors.RevisionNotFoundError:
        problem = (
            f"{endpoint} has no revision {name.revision} of {name.repo}: name a branch, a tag or a "
            "commit of it, or leave @ and what follows out"
        )
    except errors.RepositoryNotFoundError:
        problem = (
            f"{endpoint} has no {name.kind} {name.repo} that this user may see: mend the name; for "
            "a private one export HF_TOKEN"
        )
    except errors.LocalEntryNotFoundError as error:  # no connection, and not in the cache
        reason = f"{endpoint} does not answer ({shorten(str(error))})"
        raise UnreadableError(name, reason) from error
    except errors.EntryNotFoundError as error:
        problem = f"{name} lacks a file: {shorten(str(error))}"
    except errors.HFValidationError as error:
        problem = f"{name} is no name of a repository: {shorten(str(error))}"
    except InputError:
        raise
    except Exception as error:  # of the package's transport, of which each version has another
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            problem = f"{endpoint} refuses {name} (status {status}): export a valid HF_TOKEN"
        elif isinstance(error, OSError) and error.errno in _OWN_DISK:
            error.filename = error.filename or str(_cache(name))
            raise
        elif package.constants.HF_HUB_OFFLINE:
            problem = _not_whole(name)
        else:
            what = f"answers with status {status}" if status else "does not answer"
            reason = f"{endpoint} {what} ({type(error).__name__}: {shorten(str(error))})"
            raise UnreadableError(name, reason) from error
    else:
        return
    raise InputError(problem) from None


@contextmanager
def _without_bars(package: Any) -> Iterator[None]:
    """Its progress bars would be drawn over the lines of a run."""
    was_off = package.utils.are_progress_bars_disabled()
    if not was_off:
        package.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            package.utils.enable_progress_bars()


@contextmanager
def watched(name: HubName, folders: Sequence[str | Path], say: Say | None) -> Iterator[None]:
    """Looks every 10 s how much has come into folders: who waits for this process sees that it gets
    on."""
    done = threading.Event()

    def watch() -> None:
        before = size = sum(map(_bytes_in, folders))
        while not done.wait(_SAY_EVERY_S):
            now = sum(map(_bytes_in, folders))
            if now != size:
                size = now
                advance()
            if say is not None:
                say(f"fetching {name}: {bytes_text(max(size - before, 0))} so far")

    thread = threading.Thread(target=watch, name=f"fetching {name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_in(folder: str | Path) -> int:
    """The size of the files in a folder, at any depth, as far as they are there."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just got its final name
                size += os.stat(os.path.join(place, name)).st_size
    return size
