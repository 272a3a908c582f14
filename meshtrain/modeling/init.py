"""Initial values of parameters, the same on every layout.

A parameter's values are a function of (seed, its full name, block of rows): each rank draws the
blocks that its shard overlaps and keeps its part, and no rank ever holds the whole. They are drawn
on the CPU in float32 for any device.
"""

import hashlib
import math
from collections.abc import Callable, Container, Mapping
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from meshtrain.parallel.sharding import ParameterSpec, local_part, parameters_of
from meshtrain.parallel.torch_private import allocate

BLOCK_ELEMENTS = 2**16  # approximate number of values drawn from one seed


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
            rule = next(
                (rule for pattern, rule in plan.items() if fnmatchcase(spec.name, pattern)), None
            )
            if rule is None:
                raise ValueError(
                    f"init_plan has no pattern for the parameter {spec.name}: add one, or '*' as "
                    "the last"
                )
            _fill(parameter, spec, partial(_draw, rule, std=std), seed)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Allocates the model's meta tensors on `device`, uninitialized; tied parameters stay tied."""
    shared: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            shared.setdefault(parameter, []).append((module, name))
    allocate(model, device)
    for (first, first_name), *others in shared.values():
        for module, name in others:
            module._parameters[name] = first._parameters[first_name]


def _draw(rule: str, rows: Tensor, random: torch.Generator, std: float) -> None:
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


def _fill(parameter: Tensor, spec: ParameterSpec, draw: Callable[..., None], seed: int) -> None:
    """Draws the blocks of rows that overlap this rank's part of the parameter, and keeps the
    part."""
    local, (rows, *columns) = local_part(parameter)
    if local.numel() == 0:
        return
    height, *width = spec.dims
    rows_per_block = max(1, BLOCK_ELEMENTS // max(math.prod(width), 1))
    target = local.view(-1) if not spec.shape else local
    for block in range(rows.start // rows_per_block, (rows.stop - 1) // rows_per_block + 1):
        first = block * rows_per_block
        values = torch.empty(min(rows_per_block, height - first), *width)
        draw(rows=values, random=generator(seed, spec.name, block))
        begin, end = max(rows.start, first), min(rows.stop, first + values.shape[0])
        part = values[(slice(begin - first, end - first), *columns)]
        target[begin - rows.start : end - rows.start].copy_(part)


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded with a hash of the key."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
