"""Leading an inquest: what all ranks say is brought together and judged, and those that are left are told."""

import sys
import threading
import time
from dataclasses import asdict

from meshtrain.operate.deadlines import Clock
from meshtrain.operate.inquest import decide, same, unexplained, waited_for
from meshtrain.operate.ranks import Ranks
from meshtrain.operate.testimony import Seen, Verdict

FRESH_S = 5.0  # so long nobody looks again where nothing was wrong
MOVES_S = 5.0  # for ranks that all wait in one place to get on, before they count as stuck there


class Leader:
    """Of one inquest at a time."""

    def __init__(self, ranks: Ranks, clock: Clock, closed: threading.Event) -> None:
        """
        Args:
            clock: this rank's: what is said once is said again when the rank has got on.
            closed: whether the ranks part, and no longer answer.
        """
        self._ranks, self._clock, self._closed = ranks, clock, closed
        self._nothing = (False, False), float("-inf")  # when an inquest found nothing wrong, and of what kind
        self._noted = "", 0.0  # what was said last of ranks that take long, and since when this rank did not get on

    def judge(self, *, hangs: bool, failed: bool, late: bool) -> Verdict | None:
        """Asks all and decides; None if nothing is wrong.

        Args:
            hangs: as `decide` has it.
            failed: a rank has, and there will be a verdict.
            late: a rank has missed a deadline: if there is no verdict, it is said who takes long.
        """
        if not failed and self._nothing[0] == (hangs, late) and time.monotonic() - self._nothing[1] < FRESH_S:
            return None  # all ranks come with this question, and it was answered just now
        seen = self._ranks.examine()
        verdict = decide(seen, hangs=hangs)
        if verdict is not None and verdict.what == "stuck":
            verdict = self._once_more(seen)
        if self._closed.is_set():
            verdict = None
        elif verdict is None and late:
            self._note(seen, hangs)
        if verdict is None:
            self._nothing = (hangs, late), time.monotonic()
        return verdict

    def spread(self, verdict: Verdict, rank: int) -> set[int]:
        """Tells all that are left, but for this rank, and ends stopped processes; returns who is left."""
        left = self._ranks.left(verdict)
        self._ranks.tell(left - {rank}, {"ask": "end", "verdict": asdict(verdict)})
        self._ranks.put_down(verdict)
        return left

    def _once_more(self, seen: list[Seen]) -> Verdict | None:
        """All ranks in one collective are stuck in it only if they are still there a little later."""
        if self._closed.wait(MOVES_S):
            return None
        again = self._ranks.examine()
        verdict = decide(again, hangs=True)
        return None if verdict is not None and verdict.what == "stuck" and not same(seen, again) else verdict

    def _note(self, seen: list[Seen], hangs: bool) -> None:
        """A deadline has passed, and the job goes on: says once what is known of it."""
        if any(one.statement is not None and one.statement.debugged for one in seen):
            return
        puzzle = unexplained(seen) if hangs else None
        kind, text = ("busy", waited_for(seen)) if puzzle is None else ("puzzle", f"warning: {puzzle}")
        if self._noted != (noted := (kind, self._clock.since)):
            self._noted = noted
            print(text, file=sys.stderr, flush=True)
