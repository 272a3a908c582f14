"""Initial values of parameters, the same on every layout.

By an `init_plan` a parameter's values are a function of (seed, its full name, block of rows): each
rank draws the blocks that its shard overlaps and keeps its part, and no rank ever holds the whole.
They are drawn on the CPU in float32 for any device. Without a plan they are those of the model's
constructor, of which a rank makes one whole parameter at a time (`deferred_init`).
"""

import hashlib
import math
from collections.abc import Callable, Container, Mapping
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from meshtrain.parallel.deferred_init import FirstValues
from meshtrain.parallel.sharding import ParameterSpec, local_part, parameters_of, shape_of
from meshtrain.parallel.torch_private import allocate, own_parameters

BLOCK_ELEMENTS = 2**16  # approximate number of values drawn from one seed
Draw = Callable[[Tensor, torch.Generator], None]  # fills a block of rows in place


def initialise(
    model: nn.Module,
    plan: Mapping[str, str],
    *,
    seed: int,
    std: float,
    names: Container[str] | None = None,
) -> None:
    """Initializes a parallelized model.

    Args:
        model: parallelized; no longer on the meta device.
        plan: pattern of a parameter's name -> rule; the first pattern that matches counts. The
            rules: "ones", "zeros", "normal" (standard deviation `std`), "kaiming" (variance 2 /
            inputs of one output; He et al., https://arxiv.org/abs/1502.01852), "kaiming_uniform"
            (between ± 1 / sqrt(inputs), as in `nn.Linear`).
        seed: the run's seed.
        std: for "normal".
        names: the parameters to initialize; None: all.

    Raises:
        ValueError: no pattern matches a parameter, or a rule does not exist.
    """
    with torch.no_grad():
        for spec, parameter in parameters_of(model):
            if names is not None and spec.name not in names:
                continue
            draw = partial(_draw, rule=_rule_of(spec.name, plan), std=std)
            _fill(parameter, spec, draw, seed)


def fill(model: nn.Module, values: FirstValues, names: Container[str] | None = None) -> None:
    """Gives the parameters of a parallelized model the values of the constructor of the plain one,
    on the CPU one whole parameter at a time.

    Args:
        model: no longer on the meta device. Parameters that its constructor has not made, such as
            adapters, keep what they have.
        names: the parameters to fill; None: all.
    """
    with torch.no_grad():
        for spec, parameter in parameters_of(model):
            is_wanted = names is None or spec.name in names
            local, part = local_part(parameter)
            if is_wanted and spec.name in values and local.numel() > 0:
                whole = values.draw(spec.name).view(spec.dims)
                local.view(shape_of(part)).copy_(whole[part])


def _rule_of(name: str, plan: Mapping[str, str]) -> str:
    for pattern, rule in plan.items():
        if fnmatchcase(name, pattern):
            return rule
    raise ValueError(
        f"init_plan has no pattern for the parameter {name}: add one, or '*' as the last"
    )


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocates the model's meta tensors on `device`, uninitialized; tied parameters stay tied."""
    places: dict[Tensor, list[tuple[nn.Module, str]]] = {}  # parameter -> where it is registered
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((module, name))
    # It makes a new parameter in each place.
    allocate(model, device)
    for (first, first_name), *others in places.values():
        for module, name in others:
            own_parameters(module)[name] = own_parameters(first)[first_name]


def _draw(rows: Tensor, random: torch.Generator, *, rule: str, std: float) -> None:
    """Fills a block of rows in place."""
    if rule == "ones":
        rows.fill_(1.0)
    elif rule == "zeros":
        rows.zero_()
    elif rule == "normal":
        rows.normal_(0.0, std, generator=random)
    elif rule == "kaiming":
        rows.normal_(0.0, math.sqrt(2 / rows[0].numel()), generator=random)
    elif rule == "kaiming_uniform":
        bound = 1 / math.sqrt(rows[0].numel())
        rows.uniform_(-bound, bound, generator=random)
    else:
        rules = "ones, zeros, normal, kaiming and kaiming_uniform"
        raise ValueError(f"init_plan has the rule {rule!r}; the rules are {rules}")


def _fill(
    parameter: Tensor,
    spec: ParameterSpec,
    draw: Callable[[Tensor, torch.Generator], None],
    seed: int,
) -> None:
    """Draws the blocks of rows that overlap this rank's part of the parameter, and keeps the
    part."""
    local, (rows, *columns) = local_part(parameter)
    if local.numel() == 0:
        return
    height, *width = spec.dims
    target = local if spec.shape else local.view(-1)  # a scalar is one row
    # The blocks do not depend on the layout: each is drawn whole, from a seed of its own.
    rows_per_block = max(1, BLOCK_ELEMENTS // max(math.prod(width), 1))
    first_block, last_block = rows.start // rows_per_block, (rows.stop - 1) // rows_per_block
    for block in range(first_block, last_block + 1):
        first_row = block * rows_per_block
        values = torch.empty(min(rows_per_block, height - first_row), *width)
        draw(values, generator(seed, spec.name, block))
        begin = max(rows.start, first_row)
        end = min(rows.stop, first_row + len(values))
        part = values[(slice(begin - first_row, end - first_row), *columns)]
        target[begin - rows.start : end - rows.start].copy_(part)


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded with a hash of the key."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
