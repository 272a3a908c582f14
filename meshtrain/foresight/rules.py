"""The config's own rules about layouts, asked for the many candidates of a search.

A rule is a function of the values that it reads, and takes milliseconds for a large model. Its
answers are remembered by what it has read: one holds for every candidate with these values,
whatever else is different. So nothing here has to know what a rule is about.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from meshtrain.config.draft import ConfigDraft
from meshtrain.config.errors import Place
from meshtrain.config.yaml_reader import Node

Rule = Callable[[ConfigDraft, dict[str, int]], None]


class _Recorded(dict[str, Any]):
    """A dict that records what is read of it, in `reads`."""

    def __init__(self, values: Mapping[str, Any], reads: dict[str, Any]) -> None:
        super().__init__(values)
        self.reads = reads

    def __getitem__(self, key: str) -> Any:
        self.reads[key] = self.get(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.reads[key] = super().get(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.reads[str(key)] = super().get(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.reads[key] = super().get(key)
            yield key

    def keys(self) -> Any:
        return list(self)

    def values(self) -> Any:
        return [self[key] for key in self]

    def items(self) -> Any:
        return [(key, self[key]) for key in self]


class _Draft(ConfigDraft):
    """A config that was read before, of which some values are others."""

    def __init__(self, values: _Recorded) -> None:
        top = Place.in_file("", 1)
        super().__init__(root=Node({}, top, top), errors=[], elsewhere={}, values=values)

    def section(self, name: str) -> dict[str, Any]:
        """Reads only the keys of this section."""
        prefix = f"{name}."
        own = [key for key in dict.__iter__(self.values) if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.values[key] for key in own}


@dataclass
class _Question:
    """What a rule reads next, and what follows from each value."""

    key: str
    answers: "dict[Any, _Question | _Answer]" = field(default_factory=dict)


@dataclass(frozen=True)
class _Answer:
    problem: str | None


class RememberedRules:
    """Rules about a config with other layouts and other values of some keys. `values`: those of the
    config itself, such as `model.name`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self._first: dict[Rule, _Question | _Answer] = {}

    def problem(
        self, rule: Rule, sizes: Mapping[str, int], changed: Mapping[str, Any]
    ) -> str | None:
        """What a rule finds wrong with a layout of these sizes and changed values; None if
        nothing."""
        node = self._first.get(rule)
        while isinstance(node, _Question):
            value = sizes.get(node.key, changed.get(node.key))
            node = node.answers.get(value)
        if node is None:
            node = self._ask(rule, sizes, changed)
        return node.problem

    def _ask(self, rule: Rule, sizes: Mapping[str, int], changed: Mapping[str, Any]) -> _Answer:
        reads: dict[str, Any] = {}  # in the order of reading
        draft = _Draft(_Recorded({**self.values, **changed}, reads))
        rule(draft, _Recorded(sizes, reads))
        answer = _Answer(draft.errors[0].message if draft.errors else None)

        varied = [key for key in reads if key in sizes or key in changed]
        self._remember(rule, [(key, reads[key]) for key in varied], answer)
        return answer

    def _remember(self, rule: Rule, path: list[tuple[str, Any]], answer: _Answer) -> None:
        """`path`: what the rule has read, in this order. What it reads next depends only on that,
        so that paths branch where they read other values of the same key."""
        if not path:
            self._first[rule] = answer
            return
        node = self._first.setdefault(rule, _Question(path[0][0]))
        for (key, value), (next_key, _) in pairwise(path):
            assert isinstance(node, _Question)
            assert node.key == key
            node = node.answers.setdefault(value, _Question(next_key))
        assert isinstance(node, _Question)
        node.answers[path[-1][1]] = answer
