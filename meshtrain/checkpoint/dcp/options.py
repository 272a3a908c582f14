"""The optimizer's options in a DCP folder: those by which another loop has trained, compared with a
run's, and those of a run for another loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshtrain.errors import InputError
from meshtrain.optim.groups import GroupOptions

KEYS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "amsgrad",
    "maximize",
    "decoupled_weight_decay",
)
WITHOUT = "leave the optimizer out of the save, to go on from the weights alone"


@dataclass(frozen=True)
class Options:
    """The options of AdamW for one parameter, as torch has them."""

    lr: float  # on which the schedule is based
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: GroupOptions, lr: float, betas: Sequence[float], eps: float) -> "Options":
        """`lr`, `betas`, `eps`: of the run's optimizer."""
        beta1, beta2 = betas
        return cls(lr * group.lr_scale, (beta1, beta2), eps, group.weight_decay)

    def differences(self, there: Mapping[str, Any]) -> Iterator[str]:
        """What another loop does otherwise: `weight_decay is 0.1 there and 0.0 here`. Raises
        InputError: what it does is not AdamW."""
        for key in ("amsgrad", "maximize"):
            if there.get(key) is True:
                raise InputError(f"its AdamW has {key}, which is not built here: {WITHOUT}")
        if there.get("decoupled_weight_decay") is False and there.get("weight_decay"):
            raise InputError(
                f"its optimizer is Adam, whose weight decay is a part of the gradient: {WITHOUT}"
            )
        # A schedule keeps the rate on which it is based beside the one of the last update.
        named = {**there, "lr": there.get("initial_lr", there.get("lr"))}
        for key, own in vars(self).items():
            other = named.get(key)
            if isinstance(other, list):
                other = tuple(other)
            if other is not None and other != own:
                yield f"{key} is {other!a:.60} there and {own} here"


class StoredOptions:
    """The options in a folder, for each parameter.

    `get_optimizer_state_dict` numbers the groups, each with the names of its parameters; with
    `flatten_optimizer_state_dict` the parameters themselves have options.
    """

    def __init__(self, names: Sequence[str], prefix: str, value: Callable[[str], Any]) -> None:
        """`names`: of all values; `prefix`: of the options among them; `value`: of a name; None:
        there is none."""
        self._prefix = prefix
        self._value = value
        self._group_of: dict[str, str] = {}  # parameter -> number of its group
        self._of_group: dict[str, dict[str, Any]] = {}
        for name in names:
            group, _, key = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and key == "params":
                self._read_group(group)

    def of(self, parameter: str) -> Mapping[str, Any]:
        """The options of a parameter, as far as the folder has them."""
        group = self._group_of.get(parameter, parameter)
        if group not in self._of_group:
            values = {key: self._value(f"{self._prefix}{group}.{key}") for key in KEYS}
            known = {key: value for key, value in values.items() if value is not None}
            self._of_group[group] = known
        return self._of_group[group]

    def _read_group(self, group: str) -> None:
        parameters = self._value(f"{self._prefix}{group}.params")
        if isinstance(parameters, list):
            self._group_of |= {name: group for name in parameters if isinstance(name, str)}
