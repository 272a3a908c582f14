"""The terms and statistics of modules over all ranks, step by step: the part of a step's sums that
a YAML's loop (`trainer.py`) and a script's (`script/step.py`) have in common."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshtrain.experts import load_metrics
from meshtrain.loss import Field, StepTerms, agree_on_fields, split_fields
from meshtrain.mesh import Mesh
from meshtrain.parallel.fsdp import order_sums, require_one_order
from meshtrain.parallel.parallelize import has_sequence_part


class TermSums:
    """Makes one rank's addends of each step, and reads the sums.

    Attributes:
        tp_repeats_tokens: between layers all ranks of `tp` have the same tokens, so that one speaks
            for them.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self.tp_repeats_tokens = mesh.size("tp") > 1 and not has_sequence_part(model)
        self._mesh = mesh
        self._device = device
        self._fields: tuple[Field, ...] | None = None  # known after the first step

    def addends(
        self, step: int, terms: StepTerms, further: Mapping[Field, Tensor | None] | None = None
    ) -> dict[Field, Tensor]:
        """This rank's addends of all fields that some rank has.

        Args:
            further: fields that all ranks know, with this rank's addends; None: it has none.

        Raises RuntimeError: a field is new after the first step.
        """
        further = further or {}
        if self._mesh.uses_fsdp:
            stage = Field("gathers", str(self._mesh.index("pp")), size=3)
            zero = torch.zeros((), dtype=torch.float64, device=self._device)
            terms.sums[stage] = order_sums(self._mesh, zero)
        if self._fields is None:
            # Once, from what each rank has by now.
            self._fields = (*self.agree(terms), *further)
        terms.sums |= {field: sums for field, sums in further.items() if sums is not None}

        new = terms.sums.keys() - set(self._fields)
        if new:
            raise RuntimeError(
                f"step {step} attached {', '.join(map(str, sorted(new)))}, and the first step did "
                "not"
            )
        stacked = terms.stack(self._fields)
        if self.tp_repeats_tokens and not self._mesh.speaks_for_samples:
            # One rank of tp speaks for all of them.
            stacked = torch.zeros_like(stacked)
        return split_fields(stacked, self._fields)

    def agree(self, terms: StepTerms) -> tuple[Field, ...]:
        """The fields of all ranks, in one order. A collective."""
        return agree_on_fields(terms, self._mesh, same_tokens=self.tp_repeats_tokens)


def metrics_of(sums: Mapping[Field, Tensor], *, step: int, divisor: float) -> dict[str, float]:
    """What metrics.jsonl has of a step's sums over all ranks, on the host. `divisor`: what the loss
    of the global batch is divided by.

    Raises AgreedError: FSDP's ranks have gathered in different orders (see `require_one_order`).
    """
    metrics: dict[str, float] = {}
    loads: list[Tensor] = []
    for field, values in sums.items():
        # They come with what FSDP's ranks compare.
        if field.kind == "gathers":
            require_one_order(values, step=step)
        elif field.kind == "expert_loads":
            loads.append(values)
        value = field.metric(values.tolist(), divisor)
        if value is not None:
            metrics[str(field)] = value
    return metrics | load_metrics(loads)
