"""hypothesis, imported when the first property is tested: `from tests.properties import given,
settings, st`.

Importing it takes longer than collecting most files. Until a test runs, `st.lists(st.integers())`
is an expression that is evaluated later; from then on `st` is `hypothesis.strategies` itself, so
that `data.draw(st.integers())` works inside of a test. There are no deadlines, and none for the
generation of examples.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

IMPORTED = "hypothesis.strategies"


class Later:
    """An expression over hypothesis' strategies that is evaluated when a test needs it."""

    def __init__(self, evaluate: Callable[[], Any]) -> None:
        self.evaluate = functools.cache(evaluate)

    def __getattr__(self, name: str) -> "Later":
        return Later(lambda: getattr(self.evaluate(), name))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if IMPORTED in sys.modules:
            return self.evaluate()(*evaluated(arguments), **evaluated(named))
        return Later(lambda: self.evaluate()(*evaluated(arguments), **evaluated(named)))

    def __or__(self, other: Any) -> "Later":
        return Later(lambda: self.evaluate() | evaluated(other))


def evaluated(value: Any) -> Any:
    """A value in which every expression has been evaluated."""
    match value:
        case Later():
            return value.evaluate()
        case tuple() | list():
            return type(value)(evaluated(part) for part in value)
        case dict():
            return {name: evaluated(part) for name, part in value.items()}
    return value


def _strategies() -> Any:
    import hypothesis.strategies

    return hypothesis.strategies


class _Strategies:
    @staticmethod
    def composite(function: Callable) -> Callable[..., Later]:
        """The function may draw from expressions of a module, too."""

        def drawing(draw: Callable, *arguments: Any, **named: Any) -> Any:
            return function(lambda strategy: draw(evaluated(strategy)), *arguments, **named)

        return Later(lambda: _strategies().composite(functools.wraps(function)(drawing)))

    def __getattr__(self, name: str) -> Any:
        if IMPORTED in sys.modules:
            return getattr(_strategies(), name)
        return Later(lambda: getattr(_strategies(), name))


st: Any = _Strategies()


def given(*strategies: Any, **named: Any) -> Callable[[Callable], Callable]:
    """hypothesis' `given`: positional strategies fill a test's last parameters, and what is left
    are fixtures."""

    def decorate(test: Callable) -> Callable:
        parameters = list(inspect.signature(test).parameters.values())
        fixtures = [
            p for p in parameters[: len(parameters) - len(strategies)] if p.name not in named
        ]

        @functools.wraps(test)
        def property_test(*arguments: Any, **of_pytest: Any) -> None:
            import hypothesis

            settings_of_test = getattr(property_test, "settings", {})
            # A machine that does much else is no failure.
            untimed = {
                "deadline": None,
                "suppress_health_check": [hypothesis.HealthCheck.too_slow],
            }
            runs = hypothesis.given(*evaluated(strategies), **evaluated(named))(test)
            hypothesis.settings(**untimed | settings_of_test)(runs)(*arguments, **of_pytest)

        property_test.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]
        return property_test

    return decorate


def settings(**values: Any) -> Callable[[Callable], Callable]:
    """hypothesis' `settings`, above `given`."""

    def decorate(test: Callable) -> Callable:
        test.settings = values  # type: ignore[attr-defined]
        return test

    return decorate
