"""Checkpoints in object storage as a source of a resume: rank 0 brings what is newer than what is
here.

Clients of object storage raise errors of their own types, so all errors are caught here. What
cannot be asked is no reason to refuse a run that has checkpoints of its own.
"""

from contextlib import suppress

from meshtrain.checkpoint.candidates import Candidate, Candidates
from meshtrain.checkpoint.directory import name_of
from meshtrain.checkpoint.run_spec import RunSpec
from meshtrain.checkpoint.upload import Uploads
from meshtrain.errors import DamagedError, InputError, UnreadableError


class StoredCheckpoints:
    """The run's object storage, as a job sees it that starts. Only rank 0 has one."""

    def __init__(self, uploads: Uploads, spec: RunSpec, *, restarted: bool) -> None:
        """`restarted`: this is a restart of the job, which goes on from its own checkpoints
        whatever the config says."""
        self._uploads = uploads
        self._spec = spec
        self._restarted = restarted
        self._goes_on = restarted or spec.resumes_latest
        # steps in storage that were not tried yet, ascending; None: it was not asked yet
        self._untried: list[int] | None = None

    def claim(self) -> None:
        """Raises InputError: where this run is to upload to, there are checkpoints of another
        run."""
        starts_anew = self._spec.config.checkpoint.resume == "none" and not self._restarted
        if starts_anew:
            with suppress(Exception):  # the first upload reports a failure
                self._untried = self._uploads.steps()
            if self._untried:
                raise InputError(
                    f"checkpoint.resume is none, and {self._uploads.url} holds "
                    f"{name_of(self._untried[-1])} of a run already, which this one would replace: "
                    "name a prefix of its own with checkpoint.upload=URL, or go on with "
                    "checkpoint.resume=latest"
                )
        try:
            self._uploads.claim(self._spec.checkpoints, adopt=self._goes_on)
        except InputError:
            raise
        except Exception:
            return  # it is said where checkpoints are looked for or uploaded

    def bring_newer(self, candidates: Candidates) -> None:
        """Downloads the newest intact checkpoint, if it is newer than the first candidate, and
        makes it the first.

        Raises InputError: storage cannot be asked, and there is no candidate; UnreadableError: a
        checkpoint cannot be read now.
        """
        if not self._goes_on:
            return
        if self._untried is None:
            self._untried = self._ask(candidates)
        while self._untried and self._untried[-1] > candidates.newest_step:
            step = self._untried.pop()
            place = f"{self._uploads.url}/{name_of(step)}"
            try:
                path = self._uploads.fetch(step, self._spec.checkpoints)
            except (DamagedError, FileNotFoundError) as error:
                candidates.notes.append(f"{place} is passed over: {error}")
            except Exception as error:  # it may be intact: taking an older one would lose steps
                raise UnreadableError(
                    place,
                    f"{type(error).__name__}: {error}. Start again, or name an older one with "
                    "checkpoint.resume=PATH",
                ) from error
            else:
                candidates.notes.append(f"{name_of(step)} was brought from {self._uploads.url}")
                candidates.queue.insert(0, Candidate(path))
                candidates.older = True
                return

    def set_aside_later(self, step: int, notes: list[str]) -> None:
        """Sets aside what storage has of later steps; a failure is noted, and the first upload
        tries again."""
        try:
            self._uploads.set_aside_later(step)
        except Exception as error:
            notes.append(f"warning: {self._uploads.url}: {type(error).__name__}: {error}")

    def _ask(self, candidates: Candidates) -> list[int]:
        """The steps in storage; none, with a note, if it cannot be asked."""
        try:
            return self._uploads.steps()
        except Exception as error:
            problem = (
                f"{self._uploads.url} cannot be asked for checkpoints ({type(error).__name__}: "
                f"{error})"
            )
            if not candidates.queue:
                raise InputError(
                    f"{problem}, and none is here: see to it, or begin with checkpoint.resume=none"
                ) from error
            candidates.notes.append(f"warning: {problem}")
            return []
