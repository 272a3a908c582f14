"""Offloading in predictions: which optimizer states lie in the host's memory, and the seconds by
which copies over the host's link take longer than what runs beside them.

    parallel.offload      away                          back
    activations           beside a block's forward      beside a block's backward
    optimizer             beside the update, bucket by bucket, both ways at the same time
"""

from collections import defaultdict
from collections.abc import Sequence

from meshtrain.config.schema import OptimizerSection
from meshtrain.foresight.hardware import Hardware
from meshtrain.foresight.parameters import first_part, master_size
from meshtrain.foresight.work import Parameter, Work, of_each, shard_counts
from meshtrain.layout import Layout
from meshtrain.optim.groups import EMA, group_options, state_specs
from meshtrain.optim.host_states import aligned, in_buckets
from meshtrain.parallel.sharding import optimizer_shard

AVERAGES = "averages"  # of weights, which are visited after all updates

# Of each visit in a step (the update of a rule, or that of averages): the bytes of its buckets, in
# the order in which they come to the device and leave it.
Visits = list[list[int]]


def state_visits(
    works: Sequence[Work],
    layout: Layout,
    precision: str,
    optimizer: OptimizerSection,
    shard_optimizer: bool,
) -> Visits:
    """The buckets of optimizer states (`optim/host_states.py`) on the rank that has these blocks,
    and whose parts of parameters are the first ones."""
    shards = shard_counts(layout)

    def sizes_of(parameter: Parameter) -> list[tuple[str, int]]:
        """The visits in which states of a parameter come, and their bytes."""
        spec = parameter.over(shards[parameter.axis])
        if shard_optimizer:
            spec = optimizer_shard(spec, layout)
        rule = group_options(optimizer, spec).name
        sizes: dict[str, int] = {rule: 0}
        for name, state in state_specs(optimizer, spec).items():
            itemsize = master_size(precision) if state.dtype is None else state.dtype.itemsize
            visit = AVERAGES if name == EMA else rule
            sizes[visit] = sizes.get(visit, 0) + aligned(itemsize * first_part(state))
        return list(sizes.items())

    def of_block(work: Work) -> list[tuple[str, int]]:
        sizes = []
        for parameter in work.parameters:
            if parameter.trained:
                sizes += sizes_of(parameter)
        return sizes

    of_visits: dict[str, list[int]] = defaultdict(list)
    for sizes_of_block in of_each(works, of_block):
        for visit, size in sizes_of_block:
            of_visits[visit].append(size)

    visits = []
    for sizes in of_visits.values():
        visits.append([sum(sizes[i] for i in indices) for indices in in_buckets(sizes)])
    return visits


def seconds_beside_update(visits: Visits, update: float, hardware: Hardware) -> float:
    """Seconds that copies of optimizer states add to an update of so many.

    A bucket comes, is updated, and leaves, and the next ones follow: with n buckets, of which each
    takes t one way and u to be updated, a visit lasts t + u + t + (n - 1) max(t, u).
    """
    total = sum(map(sum, visits))
    if not hardware.compute.asynchronous:
        return 2 * hardware.host_seconds(total)
    added = 0.0
    for buckets in visits:
        count = len(buckets)
        if count == 0 or total == 0:
            continue
        one_way = hardware.host_seconds(sum(buckets)) / count
        updating = update * sum(buckets) / total / count
        added += 2 * one_way + (count - 1) * max(0.0, one_way - updating)
    return added


def seconds_beside_block(nbytes: float, computing: float, hardware: Hardware) -> float:
    """Seconds that copies one way add to a pass of a block, or of several."""
    took = hardware.host_seconds(nbytes)
    return max(0.0, took - computing) if hardware.compute.asynchronous else took
