"""Gradients of weights that several stages hold, such as tied embeddings in the first and in the
last: summed over these stages, in stage order, on each of them.

Every rank sends its part to the others and adds up all parts itself. So the sum is the same to the
bit on all of them, and their copies of the weight stay equal.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshtrain.job.pending import waiting
from meshtrain.mesh import Mesh
from meshtrain.parallel.torch_private import to_local
from meshtrain.pipeline.p2p import AXIS, Transfers


class TiedGradients:
    """This rank's part of the sums."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        parameter_stages: Mapping[str, tuple[int, ...]],
        placement: Sequence[int],
        transfers: Transfers,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        """
        Args:
            stages: stage number -> stage of this rank.
            parameter_stages: parameter name -> the stages that hold it.
            placement: stage -> rank of `pp`.
        """
        self._stages = stages
        self._parameter_stages = parameter_stages
        self._placement = placement
        self._transfers = transfers
        self._mesh = mesh
        self._device = device
        self._rank = mesh.index(AXIS)
        # Tied weight -> a meta tensor like this rank's part of its gradient.
        self._shapes: dict[str, Tensor] = {}
        # (weight, stage) -> the receive of that stage's gradient, and the memory for it.
        self._receives: dict[tuple[str, int], tuple[dist.Work, Tensor]] = {}

    def receive_ahead(self) -> None:
        """Posts the receives of other ranks' gradients after all transfers of a step, so that they
        overlap with computation; from the second step on, when their shapes are known."""
        for name in self._shapes:
            for stage in self._parameter_stages[name]:
                rank = self._placement[stage]
                if rank == self._rank or (name, stage) in self._receives:
                    continue
                if self._transfers.can_receive_ahead(rank):
                    self._receive(name, stage)

    def sum(self) -> None:
        """Sums the gradients of all tied weights."""
        for name, stages in self._parameter_stages.items():
            own = [stage for stage in stages if stage in self._stages]
            if len(stages) == 1 or not own:
                continue
            if self._parameter(own[0], name).requires_grad:  # else it is frozen in all stages
                self._sum_over(name, stages)

    def _sum_over(self, name: str, stages: tuple[int, ...]) -> None:
        own = {stage: self._gradient(stage, name) for stage in stages if stage in self._stages}
        first = next(iter(own.values()))
        self._shapes[name] = torch.empty_like(first, device="meta")

        # Nothing is waited for until all sends and receives are started, which all ranks do in the
        # same order of stages: a backend may run those of a connection strictly in order.
        other_ranks = sorted({self._placement[stage] for stage in stages} - {self._rank})
        works: list[dist.Work] = []
        addends: list[Tensor] = []
        for stage in stages:
            if stage in own:
                addend = own[stage].clone()
                works += [self._transfers.start_send(addend, rank) for rank in other_ranks]
                self._mesh.comm_bytes.add(AXIS, "send", addend.nbytes * len(other_ranks))
            else:
                if (name, stage) not in self._receives:
                    self._receive(name, stage)
                work, addend = self._receives.pop((name, stage))
                works.append(work)
            addends.append(addend)
        with waiting("gradients of a tied weight", self._mesh.group(AXIS)):
            for work in works:
                work.wait()

        # In stage order, whichever of the addends is this rank's own.
        for gradient in own.values():
            gradient.copy_(addends[0])
            for addend in addends[1:]:
                gradient.add_(addend)

    def _receive(self, name: str, stage: int) -> None:
        memory = torch.empty_like(self._shapes[name], device=self._device)
        work = self._transfers.start_receive(memory, self._placement[stage])
        self._receives[name, stage] = work, memory

    def _parameter(self, stage: int, name: str) -> nn.Parameter:
        return dict(self._stages[stage].named_parameters())[name]

    def _gradient(self, stage: int, name: str) -> Tensor:
        """This rank's part of a gradient; zeros if no microbatch has used the weight."""
        parameter = self._parameter(stage, name)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return to_local(parameter.grad)
