"""Whether the model of a config can be split over the layout's `tp`: asked of the model itself, without its memory."""

from meshtrain.config.checks import OF_TOKENS, ConfigDraft
from meshtrain.config.convert import INVALID
from meshtrain.config.model_spec import draft_model
from meshtrain.parallel.tp_plan import NO_SEQUENCE, SplitError, shards_sequence, split_layers


def check_split(draft: ConfigDraft, sizes: dict[str, int], keys: list[str]) -> None:
    """Reports what cannot be split over `tp`, if its size and the model are known. `keys`: names of the model's own."""
    tp = sizes.get("tp", 1)
    spec = draft_model(draft, keys) if tp > 1 else None
    if spec is None:
        return
    place = draft.place("layout.tp")
    plan = getattr(spec.module, "tp_plan", None)
    if not plan:
        name = draft.values["model.name"]
        draft.report(
            place, f"layout.tp is {tp}, and the model {name} has no tp_plan, which says how it splits: use tp: 1"
        )
        return
    sequence_parallel = draft.values["parallel.sequence_parallel"]
    if sequence_parallel is True and not shards_sequence(plan):
        message = f"parallel.sequence_parallel: {NO_SEQUENCE}: leave it out, or use false"
        draft.report(draft.place("parallel.sequence_parallel"), message)
    elif sequence_parallel is True or (sequence_parallel is None and shards_sequence(plan)):
        _check_sequence(draft, tp)
    try:
        split_layers(spec.meta, plan, tp)
    except SplitError as error:
        for problem in error.problems:
            draft.report(place, f"layout.tp: {problem}")


def _check_sequence(draft: ConfigDraft, tp: int) -> None:
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
