"""Looped schedules (gpipe, 1f1b, looped-bfs, zb-h1, ...): rank r holds stages r, r + ranks, r + 2 *
ranks, ...

They are all one schedule with different parameters. A rank first runs some forwards (its
*warm-up*). Then it alternates one forward and one backward until no forwards are left and only
backwards remain. The parameters:

- the number of warm-up forwards. They fill the time until the first gradient returns, but each is
  held in memory.
- the order in which a rank with several stages goes through them: in *groups* of microbatches, a
  group through one stage, then through the next. Larger groups wait less for each other, but hold
  more in memory.
- whether a backward is whole or split: the input gradient at once, because the previous rank waits
  for it, and the weight gradient some backwards later. The later a rank is in the pipeline, the
  longer it defers weight gradients, which then fill the end of the step, when the rank would be
  idle.

Every number of microbatches from 1 on works. If ranks hold several stages, groups have as many
microbatches as there are ranks, since the first of a group needs that long to return to the rank's
next stage; a remainder makes groups larger. Fewer microbatches than ranks are also correct, with
most of the time spent waiting.
"""

from collections.abc import Sequence

from meshtrain.pipeline.actions import Action, Kind, Schedule


def gpipe(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., GPipe, arXiv 1811.06965): all microbatches
    are held at once."""
    return _loop_schedule("gpipe", ranks, [microbatches], stages_per_rank)


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Breadth first: all microbatches run through a stage before any runs through the rank's next
    one (Lamy-Poirier, arXiv 2211.05953). A stage gathers its parameters and reduces its gradients
    only once. Every forward is held.
    """
    return _loop_schedule("looped-bfs", ranks, [microbatches], stages_per_rank)


def one_f_one_b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Alternates one forward and one backward once the first gradient returns (Narayanan et al.,
    arXiv 2104.04473). As fast as GPipe, but a rank holds only as many microbatches as there are
    ranks from it to the end."""
    return _loop_schedule("1f1b", ranks, [microbatches], stages_per_rank, warmup=1)


def interleaved_1f1b(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """1f1b over several smaller stages per rank (Narayanan et al., arXiv 2104.04473).

    The pipeline fills in smaller steps, so that with v stages per rank the bubble is 1 / v of
    1f1b's. A first gradient arrives 2 (ranks - 1 - rank) actions after the first forward of a
    rank's last stage: to the last rank and back.
    """
    return _loop_schedule(
        "interleaved-1f1b", ranks, _groups(microbatches, ranks), stages_per_rank, warmup=2
    )


def zb_h1(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """1f1b with deferred weight gradients; every rank needs the memory of 1f1b's first rank (Qi et
    al., zero bubble, arXiv 2401.10241). Gradients flow back without waiting for weight gradients,
    so the bubble is a third of 1f1b's."""
    return _loop_schedule("zb-h1", ranks, [microbatches], stages_per_rank, warmup=1, delay=1)


def zb_h2(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """No rank waits between its first and last action, in twice the memory (Qi et al., zero bubble,
    arXiv 2401.10241).

    Forwards fill the time until the first gradient returns, weight gradients the time after the
    last. Ranks end as they began, one after another. Filling all of that time takes 2 * ranks - 1
    microbatches.
    """
    return _loop_schedule("zb-h2", ranks, [microbatches], stages_per_rank, warmup=2, delay=2)


def interleaved_zb(ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """zb-h1 over several stages per rank (Qi et al., arXiv 2401.10241; Narayanan et al., arXiv
    2104.04473). Gradients return sooner than in interleaved-1f1b, so the warm-up is shorter and
    holds less."""
    return _loop_schedule(
        "interleaved-zb", ranks, _groups(microbatches, ranks), stages_per_rank, warmup=1, delay=1
    )


def _groups(microbatches: int, ranks: int) -> list[int]:
    """Sizes of as many groups as can each have a microbatch per rank, as equal as possible;
    otherwise of one group.

    A smaller group would deadlock: its first microbatch would reach a rank's next stage after the
    rest of the group is done, so the rank would wait for it before it sends the gradients for which
    other ranks wait.
    """
    count = max(1, microbatches // ranks)
    return [microbatches // count + (i < microbatches % count) for i in range(count)]


def forwards_alone(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """Only forwards, for any placement of stages: microbatches enter one after another, and of
    those that have reached a rank the one at the latest stage runs first."""
    stages = range(len(placement))
    forwards = [Action(Kind.FORWARD, stage, i) for stage in stages for i in range(microbatches)]
    # A forward takes one unit of time, so microbatch i is at stage s at the time s + i.
    forwards.sort(key=lambda action: (action.stage + action.microbatch, -action.stage))
    rows: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for action in forwards:
        rows[placement[action.stage]].append(action)
    return Schedule("forwards", microbatches, placement, tuple(map(tuple, rows)))


def _loop_schedule(
    name: str,
    ranks: int,
    groups: Sequence[int],
    stages: int,
    *,
    warmup: int | None = None,
    delay: int | None = None,
) -> Schedule:
    """The common form of all these schedules, with `stages` stages per rank.

    `warmup`: forwards per later rank, counted from the first forward of a rank's last stage on;
    None: all forwards. `delay`: backwards per earlier rank by which a weight gradient is deferred;
    None: backwards are whole.
    """
    # (index among the rank's stages, microbatch), in an order that is the same on every rank.
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    microbatches = 0
    for size in groups:
        group = range(microbatches, microbatches + size)
        for turn in range(stages):
            forwards += [(turn, microbatch) for microbatch in group]
        for turn in reversed(range(stages)):
            backwards += [(turn, microbatch) for microbatch in group]
        microbatches += size

    rows = []
    for rank in range(ranks):
        # Stages are dealt out to the ranks in turn: a rank's first one is `rank`.
        front = [Action(Kind.FORWARD, turn * ranks + rank, i) for turn, i in forwards]
        back = [(turn * ranks + rank, i) for turn, i in backwards]
        warmup_forwards = len(front)
        if warmup is not None:
            before_last_stage = (stages - 1) * max(groups)
            warmup_forwards = before_last_stage + warmup * (ranks - 1 - rank)
        deferred = None if delay is None else delay * rank
        rows.append(_alternate(front, back, warmup_forwards, deferred))
    placement = tuple(range(ranks)) * stages
    return Schedule(name, microbatches, placement, tuple(rows))


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[tuple[int, int]], warmup: int, delay: int | None
) -> tuple[Action, ...]:
    """The actions of one rank: the warm-up; a forward and a backward in turn; then the remaining
    backwards. `backwards`: (stage, microbatch) in order. `delay`: number of backwards by which
    weight gradients are deferred."""
    row = list(forwards[:warmup])
    for i, backward in enumerate(backwards):
        row += forwards[warmup + i : warmup + i + 1]  # none, if all have run
        if delay is None:
            row.append(Action(Kind.BACKWARD, *backward))
            continue
        row.append(Action(Kind.INPUT_GRAD, *backward))
        if i >= delay:
            row.append(Action(Kind.WEIGHT_GRAD, *backwards[i - delay]))

    # The weight gradients that are left when all else is done.
    if delay is not None:
        first_deferred = max(0, len(backwards) - delay)
        row += [Action(Kind.WEIGHT_GRAD, *backward) for backward in backwards[first_deferred:]]
    return tuple(row)
