"""Plain pickles: a pickle is read as data, and nothing that it names is imported or called.

A pickle is a program that names functions and classes and calls them. Here each name that a reader
expects stands for something inert, which keeps what it is given, and any other name is refused. So
the result has numbers, texts, containers and `Record`s, whatever the file says.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any


class PlainPickleError(ValueError):
    """A pickle is damaged, or names what is not plain data."""


class _Fixed(type):
    """A class whose attributes stay as they are: a pickle can set those of whatever it names."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise PlainPickleError(f"sets {name} of a class")


class Record(metaclass=_Fixed):
    """An object of a class that a pickle may name: it has the fields that were stored."""


class TupleRecord(Record):
    """The same for a class that stores its fields as a tuple, here `state`."""

    state: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state if type(state) is tuple else ()


def read_pickle(
    data: bytes,
    names: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of a pickle. Raises PlainPickleError.

    Args:
        names: `module.name` -> what stands for it: a subclass of Record, a function that only
            arranges its arguments, or a value.
        persistent: what stands for an object that the pickle keeps elsewhere; None: there is none.
    """
    unpickler = _PlainUnpickler(io.BytesIO(data))
    unpickler.names = names
    unpickler.persistent = persistent
    try:
        return unpickler.load()
    except PlainPickleError:
        raise
    # A damaged pickle may ask for anything: to add to what is no list, or for endless memory.
    except Exception as error:
        raise PlainPickleError(f"is no pickle that can be read ({error})") from None


class _PlainUnpickler(pickle.Unpickler):
    names: Mapping[str, Any]
    persistent: Callable[[Any], Any] | None

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name not in self.names:
            raise PlainPickleError(
                f"names {full_name[:100]!a}, which is no plain data: nothing of it was run"
            )
        return self.names[full_name]

    def persistent_load(self, reference: Any) -> Any:
        if self.persistent is None:
            raise PlainPickleError("keeps a part of its value elsewhere")
        return self.persistent(reference)
