"""The config's rules in a search: an answer is remembered by what the rule has read."""

import itertools
from collections import Counter
from typing import Any

from meshtrain.config import Config
from meshtrain.config.draft import ConfigDraft
from meshtrain.config.layout_checks import OF_LAYOUT
from meshtrain.foresight.rules import RememberedRules
from meshtrain.foresight.space import Space, value_of
from tests.foresight.test_search import SMALL

SETTINGS = {
    "parallel.context_heads": (1, 2),
    "parallel.sequence_parallel": (None, True, False),
    "parallel.shard_optimizer": (False, True),
    "pipeline.schedule": ("1f1b", "zb-h1", "zbv"),
}


def test_remembered_answers_are_those_of_the_rules() -> None:
    config = Config.load(SMALL, ["layout={dp_shard: -1}"], world_size=16)
    remembered = Space(config).rules
    answers: Counter[str | None] = Counter()
    for pp, shards, cp, tp in itertools.product((1, 4), (1, 2), (1, 2), (1, 2, 5)):
        sizes = {"pp": pp, "dp_replicate": 1, "dp_shard": shards, "cp": cp, "tp": tp}
        for values in itertools.product(*SETTINGS.values()):
            changed = dict(zip(SETTINGS, values, strict=True))
            for rule in OF_LAYOUT:
                answer = remembered.problem(rule, sizes, changed)
                anew = RememberedRules(remembered.values).problem(rule, sizes, changed)
                assert answer == anew
                answers[answer] += 1
    assert len(answers) > 3


def test_a_rule_is_asked_again_only_if_what_it_reads_is_different() -> None:
    asked: list[Any] = []

    def rule(draft: ConfigDraft, sizes: dict[str, int]) -> None:
        heads = draft.values["model.heads"]
        tp = sizes.get("tp", 1)
        splits = tp > 1 and draft.values["parallel.splits"]
        asked.append((tp, splits))
        if splits and heads % tp:
            draft.refuse("layout.tp", f"{tp} does not divide {heads} heads")

    rules = RememberedRules({"model.heads": 6})
    problems = [
        rules.problem(
            rule, {"tp": tp, "pp": pp}, {"parallel.splits": splits, "batch.micro_size": 1}
        )
        for pp, tp, splits in itertools.product((1, 2, 4), (1, 3, 4), (False, True))
    ]
    assert asked == [(1, False), (3, False), (3, True), (4, False), (4, True)]
    refused = "layout.tp: 4 does not divide 6 heads"
    assert problems == [None, None, None, None, None, refused] * 3


def test_a_rule_that_goes_through_all_sizes_has_read_them() -> None:
    asked: list[Any] = []

    def rule(draft: ConfigDraft, sizes: dict[str, int]) -> None:
        asked.append(dict(sizes))
        if 3 in sizes.values():
            draft.report(draft.place("layout"), "three")

    rules = RememberedRules({})
    layouts = [{"pp": pp, "tp": tp} for pp, tp in itertools.product((1, 3), (1, 2))]
    problems = [rules.problem(rule, sizes, {}) for sizes in [*layouts, *layouts]]
    assert asked == layouts
    assert problems == [None, None, "three", "three"] * 2


def test_values_are_those_of_the_config() -> None:
    config = Config.load(SMALL, world_size=1)
    values = Space(config).rules.values
    for key in ("data.seq_len", "train.precision", "parallel.compile"):
        assert values[key] == value_of(config, key)
    assert values["model.name"] == config.model.name
