"""Whether the model of a config can be split over the layout's `tp`: asked of the model itself, without its memory."""

from meshtrain.config.plain import plain_model
from meshtrain.config.rules import OF_TOKENS, Draft
from meshtrain.config.values import INVALID
from meshtrain.layout import Layout, LayoutError
from meshtrain.split import NO_SEQUENCE, SplitError, shards_sequence, split_layers


def check_split(draft: Draft, sizes: dict[str, int], world_size: int | None, keys: list[str]) -> None:
    """Reports what cannot be split over `tp`. It is not judged while its size, or the model, is not known.

    Args:
        sizes: the layout as written. keys: the names of the model's own keys.
    """
    try:
        sizes = sizes if world_size is None else Layout.resolve(sizes, world_size).sizes
    except LayoutError:  # reported already
        return
    tp = sizes.get("tp", 1)
    found = plain_model(draft, keys) if tp > 1 else None
    if found is None:
        return
    module, model = found
    where = draft.place("layout.tp")
    plan = getattr(module, "tp_plan", None)
    if not plan:
        name = draft.values["model.name"]
        draft.report(
            where, f"layout.tp is {tp}, and the model {name} has no tp_plan, which says how it splits: use tp: 1"
        )
        return
    asked = draft.values["parallel.sequence_parallel"]
    if asked is True and not shards_sequence(plan):
        message = f"parallel.sequence_parallel: {NO_SEQUENCE}: leave it out, or use false"
        draft.report(draft.place("parallel.sequence_parallel"), message)
    elif asked is True or (asked is None and shards_sequence(plan)):
        _check_sequence(draft, tp)
    try:
        split_layers(model, plan, tp)
    except SplitError as error:
        for problem in error.problems:
            draft.report(where, f"layout.tp: {problem}")


def _check_sequence(draft: Draft, tp: int) -> None:
    length, source = draft.values["data.seq_len"], draft.values["data.source"]
    if INVALID in (length, source) or source not in OF_TOKENS:
        return
    if length % tp:
        near = " or ".join(str(n) for n in (length // tp * tp, -(-length // tp) * tp) if n)
        draft.report(
            draft.place("data.seq_len"),
            f"data.seq_len {length} does not divide over layout.tp {tp}, which shares the sequence: use {near}, or "
            "parallel.sequence_parallel: false",
        )
