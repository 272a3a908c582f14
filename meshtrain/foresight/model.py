"""What a trace needs of a config's model: a microbatch for it, and words for what cannot be
traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from meshtrain.config import Config, spec_of
from meshtrain.data.batch import Batch
from meshtrain.errors import InputError
from meshtrain.modeling import kinds
from meshtrain.modeling.flops import why_not
from meshtrain.modeling.kinds import OWN_TARGETS, UntracedError, known_blocks
from meshtrain.parallel.options import ParallelOptions
from meshtrain.parallel.tp_plan import plan_splits_sequence
from meshtrain.parallel.verify import compares


@contextmanager
def untraced_errors() -> Iterator[None]:
    """Context that turns whatever the model's code raises into UntracedError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise UntracedError(why_not(error)) from error


def without_sequence_parts(config: Config) -> Config | None:
    """The config of a run that has turned sequence parallelism off, because the check of its model
    passes only without it (`parallel.verify`). None: such a run does not do so, or does not have it
    on."""
    layout, parallel = config.resolved, config.parallel
    assert layout is not None
    if layout.size("tp") == 1 or layout.size("ep") > 1:
        return None
    spec = spec_of(config)
    plan = spec.plan("tp_plan")
    is_on_by_default = parallel.sequence_parallel is None and plan_splits_sequence(plan or {})
    if not is_on_by_default:
        return None
    if not compares(spec.meta, ParallelOptions(verify=parallel.verify)):
        return None
    return replace(config, parallel=replace(parallel, sequence_parallel=False))


def batch_of(config: Config) -> Batch:
    """A microbatch before it is split over `cp`: of tokens, or for a classifier of images. Raises
    UntracedError: the model's Config does not give the size of images."""
    if spec_of(config).loss is not None and config.data.source.endswith(".py"):
        raise UntracedError(OWN_TARGETS)
    return kinds.batch_of(
        spec_of(config), config.batch.micro_size, config.data.seq_len, config.data.mask_documents
    )


def alike(config: Config) -> tuple[int, ...]:
    """`Blocks.first` of a config's model."""
    return known_blocks(spec_of(config), config.data.seq_len, config.data.mask_documents).first
