"""Looped schedules (gpipe, 1f1b, looped-bfs, zb-h1, ...): rank r holds stages r, r + ranks, r + 2 * ranks, ...

They are all one schedule with other numbers. A rank first runs some forwards (its *warm-up*). Then it alternates:
a forward, a backward, a forward, a backward, until there are no forwards left and only backwards remain. What differs:

- how many forwards the warm-up has. More of them fill the time until the first gradient comes back, and each is held.
- in which order a rank with several stages goes through them: in *groups* of microbatches, a group through one stage,
  then through the next. Larger groups wait less for each other, and more of them is held.
- whether a backward is done at once, or in two: the input gradient now, because the rank before waits for it, and the
  weight gradient some backwards later. In time, the later the rank is in the pipeline, the longer it puts its weight
  gradients off: they fill the end of the step, in which there would be nothing else to do.

Every count of microbatches works, from 1 on. Where ranks hold several stages, groups have as many microbatches as there
are ranks, since that is how long the first of a group needs to come round; what is left over makes groups larger.
Fewer microbatches than ranks are right too, with most of the time spent waiting.
"""

from collections.abc import Sequence

from meshtrain.pipeline.actions import Action, Kind, Schedule


def gpipe(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965): every microbatch is held at once."""
    return _loop_schedule("gpipe", ranks, [microbatches], stages_per_rank)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Breadth first: all microbatches through a stage before any goes through the rank's next one (Lamy-Poirier, arXiv
    2211.05953). Of each stage the parameters are gathered and the gradients reduced only once. Every forward is held.
    """
    return _loop_schedule("looped-bfs", ranks, [microbatches], stages_per_rank)


def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """One forward, one backward, as soon as the first gradient is back (Narayanan et al., arXiv 2104.04473). It takes
    the time of GPipe, and a rank holds only as many microbatches as there are ranks from it to the end."""
    return _loop_schedule("1f1b", ranks, [microbatches], stages_per_rank, warmup=1)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """1f1b over several smaller stages per rank (Narayanan et al., arXiv 2104.04473).

    The pipeline fills with smaller steps, so that with v stages a rank the bubble is 1 / v of 1f1b's. A first gradient
    is due 2 (ranks - 1 - rank) actions after a rank's last stage had its first forward: there and back again.
    """
    return _loop_schedule("interleaved-1f1b", ranks, _groups(microbatches, ranks), stages_per_rank, warmup=2)


def zb_h1(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """1f1b with weight gradients put off, in the memory of its first rank (Qi et al., zero bubble, arXiv 2401.10241).
    Gradients travel back without waiting for weight gradients, so that the bubble is a third of 1f1b's."""
    return _loop_schedule("zb-h1", ranks, [microbatches], stages_per_rank, warmup=1, delay=1)


def zb_h2(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Schedule:
    """Nobody waits between its first and last action, in twice the memory (Qi et al., zero bubble, arXiv 2401.10241).

    Forwards fill the time until the first gradient is back, weight gradients that of the last. The ranks end as they
    began, one after another. It takes 2 * ranks - 1 microbatches to fill all of that time.
    """
    return _loop_schedule("zb-h2", ranks, [microbatches], stages_per_rank, warmup=2, delay=2)


def interleaved_zb(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """zb-h1 over several stages per rank (Qi et al., arXiv 2401.10241; Narayanan et al., arXiv 2104.04473). Gradients
    come back sooner than in interleaved-1f1b, so that the warm-up is shorter and less is held."""
    return _loop_schedule("interleaved-zb", ranks, _groups(microbatches, ranks), stages_per_rank, warmup=1, delay=1)


def _groups(microbatches: int, ranks: int) -> list[int]:
    """Sizes of as many groups as can have a microbatch for each rank, as equal as they can be; else of one group.

    No group has fewer: the first of it would come to a rank's next stage after the rest of it is done, and the rank's
    turn to wait for it would come before its turn to send the gradients that others wait for: a deadlock.
    """
    count = max(1, microbatches // ranks)
    return [microbatches // count + (i < microbatches % count) for i in range(count)]


def forwards_alone(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """No backwards, of stages that are on any ranks: microbatch after microbatch comes in, and of what has come to a
    rank the latest stage goes first."""
    order = sorted((stage + i, -stage, i) for stage in range(len(placement)) for i in range(microbatches))
    forwards = [Action(Kind.FORWARD, -stage, i) for _, stage, i in order]
    ranks = range(max(placement) + 1)
    actions = (tuple(action for action in forwards if placement[action.stage] == rank) for rank in ranks)
    return Schedule("forwards", microbatches, placement, tuple(actions))


def _loop_schedule(
    name: str, ranks: int, groups: Sequence[int], stages: int, *, warmup: int | None = None, delay: int | None = None
) -> Schedule:
    """The schedule of all these names, with so many `stages` per rank.

    `warmup`: forwards for each later rank, counted from the first one of a rank's last stage on; None: all forwards.
    `delay`: backwards for each earlier rank, after which a weight gradient is done; None: backwards are whole.
    """
    forwards: list[tuple[int, int]] = []  # (which of the rank's stages, microbatch), the same on every rank
    backwards: list[tuple[int, int]] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        forwards += [(turn, microbatch) for turn in range(stages) for microbatch in group]
        backwards += [(turn, microbatch) for turn in reversed(range(stages)) for microbatch in group]
        first += size
    before = (stages - 1) * max(groups)  # forwards before the first one of a rank's last stage
    rows = []
    for rank in range(ranks):
        front = [Action(Kind.FORWARD, turn * ranks + rank, microbatch) for turn, microbatch in forwards]
        back = [(turn * ranks + rank, microbatch) for turn, microbatch in backwards]
        count = len(front) if warmup is None else before + warmup * (ranks - 1 - rank)
        rows.append(_alternate(front, back, count, None if delay is None else delay * rank))
    return Schedule(name, first, tuple(range(ranks)) * stages, tuple(rows))


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[tuple[int, int]], warmup: int, delay: int | None
) -> tuple[Action, ...]:
    """One rank: the warm-up; a forward and a backward in turn; then what is left of the backwards.
    `backwards`: (stage, microbatch) in order. `delay`: how many backwards later the weight gradient of one is done."""
    row = list(forwards[:warmup])
    for i, backward in enumerate(backwards):
        row += forwards[warmup + i : warmup + i + 1]
        if delay is None:
            row.append(Action(Kind.BACKWARD, *backward))
            continue
        row.append(Action(Kind.INPUT_GRAD, *backward))
        if i >= delay:
            row.append(Action(Kind.WEIGHT_GRAD, *backwards[i - delay]))
    if delay is not None:
        row += [Action(Kind.WEIGHT_GRAD, *backward) for backward in backwards[max(0, len(backwards) - delay) :]]
    return tuple(row)
