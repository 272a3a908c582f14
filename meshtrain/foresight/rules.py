"""The config's own rules about layouts, asked for the many candidates of a search.

A rule is a function of the values that it reads, and takes milliseconds for a large model. Its
answers are remembered by what it has read: one holds for every candidate with these values,
whatever else is different. So nothing here has to know what a rule is about.
"""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from meshtrain.config.draft import ConfigDraft
from meshtrain.config.errors import Place
from meshtrain.config.yaml_reader import Node

Rule = Callable[[ConfigDraft, dict[str, int]], None]


class RememberedRules:
    """Rules about a config with other layouts and other values of some keys. `values`: those of the
    config itself, such as `model.name`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        # Rule -> the keys that it has read in some case -> their values -> the problem.
        self._known: dict[Rule, dict[tuple[str, ...], dict[tuple[Any, ...], str | None]]] = {}

    def problem(
        self, rule: Rule, sizes: Mapping[str, int], changed: Mapping[str, Any]
    ) -> str | None:
        """What a rule finds wrong with a layout of these sizes and changed values; None if
        nothing."""
        varied = {**sizes, **changed}
        known = self._known.setdefault(rule, {})
        for keys, problems in known.items():
            values = tuple(varied.get(key) for key in keys)
            if values in problems:
                return problems[values]

        reads: dict[str, Any] = {}
        draft = _Draft(_Recorded({**self.values, **changed}, reads))
        recorded_sizes: Any = _Recorded(sizes, reads)
        rule(draft, recorded_sizes)
        problem = draft.errors[0].message if draft.errors else None

        keys = tuple(key for key in reads if key in varied)
        known.setdefault(keys, {})[tuple(reads[key] for key in keys)] = problem
        return problem

    def reads(self, rule: Rule) -> set[str]:
        """The varied keys that a rule has read in any case so far."""
        return {key for keys in self._known.get(rule, ()) for key in keys}


class _Recorded(UserDict[str, Any]):
    """A dict that records in `reads` what is read of it."""

    def __init__(self, values: Mapping[str, Any], reads: dict[str, Any]) -> None:
        super().__init__(values)
        self.reads = reads

    def __getitem__(self, key: str) -> Any:
        self.reads.setdefault(key, self.data.get(key))
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        self.reads.setdefault(str(key), self.data.get(str(key)))
        return key in self.data


class _Draft(ConfigDraft):
    """A config that was read before, of which some values are others."""

    def __init__(self, values: Any) -> None:
        top = Place.in_file("", 1)
        super().__init__(root=Node({}, top, top), errors=[], elsewhere={}, values=values)

    def section(self, name: str) -> dict[str, Any]:
        """Reads only the keys of this section."""
        prefix = f"{name}."
        own = [key for key in self.values if key.startswith(prefix)]
        return {key.removeprefix(prefix): self.values[key] for key in own}
