"""Expert parallelism: whole experts are distributed over the ranks of `ep`, and tokens are sent to
their experts.

Each rank routes its own tokens. Rows, one per slot of a token, go to the rank that has their
expert, and the results come back in the original order (GShard, https://arxiv.org/abs/2006.16668).
No row is dropped: which rows exceed a capacity would depend on the other tokens of the microbatch,
and so on the layout. A step under a `RowLimit` in which rows had no room is repeated without the
limit. An expert's gradient is a sum over all rows that it received.

Tensors hold (n, d) rows, sorted by expert, lowest first.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from meshtrain.errors import InputError
from meshtrain.job.pending import waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.collectives import (
    AxisGroup,
    axis_group,
    axis_group_by_name,
    differentiable,
    operator,
)
from meshtrain.parallel.linear.grouped import GatherRows
from meshtrain.parallel.mixed_precision import random_state
from meshtrain.parallel.sharding import chunk_lengths
from meshtrain.parallel.tensor_parallel import shard_parameter
from meshtrain.parallel.torch_private import backward_is_running
from meshtrain.parallel.tp_plan import expert_modules, plan_of

if TYPE_CHECKING:
    from meshtrain.parallel.options import ParallelOptions

AXIS = "ep"


def apply_expert_parallel(model: nn.Module, mesh: Mesh, options: "ParallelOptions") -> None:
    """Keeps each `ep` rank's own experts, as DTensors, and dispatches rows to them. Does nothing
    without `ep`.

    The experts of a layer are a module, of any class, that the model's `ep_plan` names: dim 0 of
    its parameters is the experts, split as by `torch.chunk`, and it computes through its `dispatch`
    (`meshtrain.experts.Experts`).

    Raises:
        InputError: the model names no experts, the plan names a module that has none, or layers
            share experts that FSDP would have to shard.
    """
    if mesh.size(AXIS) == 1:
        return
    plan = plan_of(model, "ep_plan", options.ep_plan)
    if not plan:
        raise InputError(
            f"{type(model).__name__} has no ep_plan, which names its experts: use expert_parallel: "
            "1"
        )
    group = axis_group(mesh, AXIS)
    group.measured_wait = options.measured_wait
    same_tokens = None
    if mesh.size("tp") > 1 and not options.sequence_parallel:
        same_tokens = axis_group(mesh, "tp")
    sharded: dict[Tensor, nn.Parameter] = {}  # keeps shared parameters shared
    for name in expert_modules(model, plan):
        module: Any = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            # Each module of experts is a unit of FSDP.
            if parameter in sharded and mesh.size("efsdp") > 1:
                whole = mesh.size(AXIS) * mesh.size("efsdp")
                raise InputError(
                    f"{name} shares {key} with another layer, and FSDP cannot shard experts of two "
                    f"layers: use expert_parallel: {whole}, or dp_replicate"
                )
            if parameter not in sharded:
                sharded[parameter] = shard_parameter(parameter, mesh, Shard(0), AXIS)
            setattr(module, key, sharded[parameter])
        module.dispatch = ExpertDispatch(group, same_tokens)


def dispatched_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, or of a stage, whose experts are distributed over several ranks."""
    return [
        module
        for module in model.modules()
        if isinstance(vars(module).get("dispatch"), ExpertDispatch)
    ]


class RowLimit:
    """A capacity of rows for messages to experts: with fixed sizes, the host does not have to wait
    for sizes.

    Rows without room are left out and counted. The code that sets a limit has to repeat the step
    without it then.
    """

    def __init__(self, factor: float, device: torch.device) -> None:
        """`factor`: multiple of the rows that a rank sends to each rank if the load of experts is
        even."""
        self.factor = factor
        # rows of this rank without room, so far
        self.overflow = torch.zeros((), dtype=torch.float64, device=device)


def message_rows(rows: int, experts_of_rank: int, experts: int, factor: float) -> int:
    """How many of its `rows` a rank can send to each rank under a `RowLimit`: the same on all of
    them."""
    return min(rows, math.ceil(factor * rows * experts_of_rank / experts))


@contextmanager
def limit_rows(model: nn.Module, limit: RowLimit | None) -> Iterator[None]:
    """Inside, forwards and backwards of a model, or of stages, send rows under this limit. None: no
    limit."""
    dispatches: list[ExpertDispatch] = [
        vars(module)["dispatch"] for module in dispatched_modules(model)
    ]
    for dispatch in dispatches:
        dispatch.limit = limit
    try:
        yield
    finally:
        for dispatch in dispatches:
            dispatch.limit = None


class Retry:
    """Runs a step's forwards and backwards again from the state in which the step began, where a
    `RowLimit` has left out rows."""

    def __init__(self, model: nn.Module, run: Callable[[], None]) -> None:
        """Remembers the state. `run`: the forwards and backwards, which begin with no gradients."""
        self._run = run
        # A forward may write to buffers, and draw random numbers.
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._restore_random_state = random_state()

    def run(self) -> None:
        self._restore_random_state()
        for buffer, value in self._buffers:
            buffer.copy_(value)
        self._run()


class ExpertDispatch:
    """Sends rows to their experts over `ep`, and returns the results: the `dispatch` of a layer's
    `Experts`.

    All ranks of the axis call it together, even without rows. Empty messages are not sent, except
    under a limit, for which all ranks need the same number of `rows`. Evaluation and generation
    work the same way.
    """

    limit: RowLimit | None = None  # see `limit_rows`

    def __init__(self, axis_group: AxisGroup, same_tokens: AxisGroup | None = None) -> None:
        """`same_tokens`: the ranks, of `tp` without sequence parallelism, that have the same rows.
        Each sends its share of them, and they exchange the results."""
        self.axis_group = axis_group
        self.same_tokens = same_tokens

    def __call__(
        self, rows: Tensor, counts: Tensor, products: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """
        Args:
            rows: (n, d), this rank's slots sorted by expert; rows beyond the sum of `counts` belong
                to no expert.
            counts: (E,) int64, number of rows for each expert.
            products: (rows of this rank's experts, their counts) -> one result row per row.

        Returns:
            (n, d), the results in the order of `rows`; zeros for rows without an expert.
        """
        if self.same_tokens is None:
            return self._dispatch(rows, counts, products)
        group = self.same_tokens
        share = -(-len(rows) // group.size)
        begin = group.index * share
        ends = counts.cumsum(0)
        own = ends.clamp(max=begin + share) - (ends - counts).clamp(min=begin)
        part = _Share.apply(rows, share, group.name)
        results = self._dispatch(part, own.clamp(min=0), products)
        return _Shares.apply(results, len(rows), group.name)

    def _dispatch(
        self, rows: Tensor, counts: Tensor, products: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        if self.limit is not None:
            return self._limited(rows, counts, products, self.limit)
        axis = self.axis_group
        table = ops.exchange_counts(counts, axis.name)
        send, receive = ops.message_sizes(counts, table, axis.name).tolist()
        order = _sort_by_expert(table, sum(receive))
        # Rows beyond the counts are at the end, and are not sent.
        results = self._exchange(
            _resize(rows, sum(send)), send, receive, order, products, table.sum(0)
        )
        return _resize(results, len(rows))

    def _limited(
        self,
        rows: Tensor,
        counts: Tensor,
        products: Callable[[Tensor, Tensor], Tensor],
        limit: RowLimit,
    ) -> Tensor:
        """With messages whose sizes follow from the number of rows alone."""
        axis = self.axis_group
        table = ops.exchange_counts(counts, axis.name)
        own_experts = chunk_lengths(len(counts), axis.size)
        room = message_rows(len(rows), own_experts[0], len(counts), limit.factor)
        send = [room if own else 0 for own in own_experts]
        receive = [send[axis.index]] * axis.size

        slots = _fill_messages(_rows_by_rank(counts, axis.size), len(rows), room, sum(send), limit)
        messages = _GatherOrZeros.apply(rows, slots.source, slots.slot)

        # What arrives from each rank: the rows that had room, by expert, then padding, which is as
        # if it were of one more expert.
        had_room = table.cumsum(1).clamp(max=room)
        table = had_room.diff(dim=1, prepend=table.new_zeros(axis.size, 1))
        padding = receive[0] - table.sum(1, keepdim=True)
        order = _sort_by_expert(torch.cat([table, padding], 1), sum(receive))

        answers = self._exchange(messages, send, receive, order, products, table.sum(0))
        return _GatherOrZeros.apply(answers, slots.slot, slots.source)

    def _exchange(
        self,
        messages: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        order: tuple[Tensor, Tensor],
        products: Callable[[Tensor, Tensor], Tensor],
        counts: Tensor,
    ) -> Tensor:
        """Messages by target rank -> their results, in the same order. `order`: of
        `_sort_by_expert`; `counts`: the rows that arrive for each expert of this rank."""
        group = self.axis_group.name
        by_expert, inverse = order
        arrived = ops.exchange_rows(messages, send, receive, group)
        results = products(GatherRows.apply(arrived, by_expert, inverse, 1), counts)
        by_source = GatherRows.apply(results, inverse, by_expert, 1)
        return ops.exchange_rows(by_source, receive, send, group)


class _Share(torch.autograd.Function):
    """(n, d), the same on all ranks -> (m, d): the index-th m rows, zero-padded at the end. The
    gradient is that of all rows, the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: int, group: str) -> Tensor:
        ctx.settings = len(rows), group
        begin = axis_group_by_name(group).index * share
        return _resize(rows[begin : begin + share], share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Shares.apply(grad, *ctx.settings), None, None


class _Shares(torch.autograd.Function):
    """(m, d) of each rank -> (n, d), all of them without the padding: the inverse of `_Share`, with
    a gradient that is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, n: int, group: str) -> Tensor:
        ctx.settings = len(part), group
        return ops.all_gather(part, group)[:n]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Share.apply(grad, *ctx.settings), None, None


class _MessageSlots(NamedTuple):
    """Where rows are in messages of a fixed size; -1 for none."""

    source: Tensor  # of each message row, the index among this rank's rows
    slot: Tensor  # of each of this rank's rows, the message row


def _fill_messages(rows: Tensor, n: int, room: int, total: int, limit: RowLimit) -> _MessageSlots:
    """For messages of `room` rows to each rank, `total` rows in all. `rows`: (p,), how many of this
    rank's n rows go to each rank."""
    # Rows are sorted by the rank that they go to: those of rank r are [begins[r], ends[r]).
    ends = rows.cumsum(0)
    begins = ends - rows
    if not backward_is_running():  # a recomputed block has already been counted
        limit.overflow += (rows - room).clamp(min=0).sum()

    # The row in each place of the messages, or -1 behind the last row of a message.
    place = torch.arange(total, device=rows.device)
    target = place // max(room, 1)
    number = place % max(room, 1)  # in the message to the target
    row_of_place = torch.where(number < rows[target], begins[target] + number, -1)

    # The place of each row, or -1 where its message has no room.
    row = torch.arange(n, device=rows.device)
    target = torch.searchsorted(ends, row, right=True).clamp(max=len(rows) - 1)
    number = row - begins[target]
    has_room = (row < ends[-1]) & (number < room)
    place_of_row = torch.where(has_room, target * room + number, -1)
    return _MessageSlots(row_of_place, place_of_row)


class _GatherOrZeros(torch.autograd.Function):
    """x[index], with zeros where index is -1. `inverse`: the position of each row of x in the
    result, -1 for none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse, index)
        return x.index_select(0, index.clamp(min=0)).masked_fill_((index < 0)[:, None], 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GatherOrZeros.apply(grad, *ctx.saved_tensors), None, None


def _resize(rows: Tensor, n: int) -> Tensor:
    """The first n rows, zero-padded if there are fewer."""
    return rows if len(rows) == n else F.pad(rows, (0, 0, 0, n - len(rows)))


def _rows_by_rank(counts: Tensor, ranks: int) -> Tensor:
    """(E,) -> (p,), the number of rows that go to each rank."""
    most = chunk_lengths(len(counts), ranks)[0]
    padded = F.pad(counts, (0, ranks * most - len(counts)))
    return padded.view(ranks, -1).sum(1)


def _sort_by_expert(table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows arrive ordered by source and then by expert, with counts `table` (p, own). Returns the
    permutation that orders them by expert and then by source, and its inverse. Needs no sort and
    does not wait for the device."""
    # Each (source, expert) is a block of rows, which moves as a whole.
    by_source = table.flatten()
    by_expert = table.t().flatten()
    begins = (by_source.cumsum(0) - by_source).view(table.shape)
    targets = (by_expert.cumsum(0) - by_expert).view(table.shape[1], table.shape[0]).t()
    shift = begins - targets

    index = torch.arange(rows, device=table.device)
    order = index + shift.t().flatten().repeat_interleave(by_expert, output_size=rows)
    inverse = index - shift.flatten().repeat_interleave(by_source, output_size=rows)
    return order, inverse


# Operators, so that selective recomputation saves received data -----------------------------------


def _exchange_counts(counts: Tensor, group: str) -> Tensor:
    """(E,) -> (p, own): the number of rows that each rank sends to each of this rank's experts."""
    axis = axis_group_by_name(group)
    experts = chunk_lengths(len(counts), axis.size)  # of each rank
    own = experts[axis.index]
    received = axis.start_all_to_all_single(counts, experts, [own] * axis.size).wait()
    return received.view(axis.size, own)


def _exchange_counts_shapes(counts: Tensor, group: str) -> Tensor:
    axis = axis_group_by_name(group)
    return counts.new_empty(axis.size, chunk_lengths(len(counts), axis.size)[axis.index])


def _message_sizes(counts: Tensor, table: Tensor, group: str) -> Tensor:
    """On the host, (2, p): the number of rows to send to each rank, and to receive from it."""
    axis = axis_group_by_name(group)
    sizes = torch.stack([_rows_by_rank(counts, axis.size), table.sum(1)])
    if not sizes.is_cuda:
        return sizes
    # The only place in a step where the host waits for the device, once per layer and forward: the
    # host must know the sizes to allocate memory and to send rows. Recomputation saves the sizes
    # and does not wait.
    on_host = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
    on_host.copy_(sizes, non_blocking=True)
    with axis.measured_wait(), waiting("the sizes of messages to experts", axis.group):
        torch.cuda.current_stream().synchronize()
    return on_host


def _exchange_rows(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    return axis_group_by_name(group).start_all_to_all_single(rows, send, receive).wait()


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.sizes = inputs[1:]


def _exchange_rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    send, receive, group = ctx.sizes
    return ops.exchange_rows(grad, receive, send, group), None, None, None


operator("exchange_counts", _exchange_counts, _exchange_counts_shapes)
operator(
    "message_sizes",
    _message_sizes,
    lambda counts, table, group: torch.empty(2, len(table), dtype=torch.int64),
)
operator(
    "exchange_rows",
    _exchange_rows,
    lambda rows, send, receive, group: rows.new_empty(sum(receive), *rows.shape[1:]),
)
differentiable("exchange_rows", _exchange_rows_backward, _keep_sizes)
ops = torch.ops.meshtrain
