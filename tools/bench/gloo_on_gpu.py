"""Runs a module on several ranks that share one GPU, with gloo between them: for NCCL below 2.30,
which refuses that.

    NCCL_MULTI_RANK_GPU_ENABLE=1 torchrun --nproc-per-node=2 gloo_on_gpu.py MODULE [ARGUMENT ...]

Wherever the module asks for NCCL it gets a process group that copies tensors to the CPU, has gloo
exchange them, and copies them back. What runs on the GPU is the same as over NCCL; what is not
seen are NCCL's own streams and the order of its operations.
"""

import runpy
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

NAME = "gloo_on_gpu"
# Any: torch's stubs describe what C++ calls, not what a group in Python is called with.
ProcessGroup: Any = dist.ProcessGroup


class Done(dist._Work):
    """An operation that is finished when it is waited for."""

    def __init__(self, finish: Callable[[], object], results: Any = None) -> None:
        super().__init__()
        self._finish: Callable[[], object] | None = finish
        self._future: torch.futures.Future = torch.futures.Future()
        self._results = results

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            self._finish()
            self._finish = None
            self._future.set_result(self._results)
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> Any:
        self.wait()
        return self._future


def done(results: Any) -> Done:
    """An operation that has ended."""
    work = Done(lambda: None, results)
    work.wait()
    return work


class GlooOnGpu(ProcessGroup):
    """gloo for tensors of a GPU. Collectives end before they return; sends and receives are waited
    for."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        inner_store = dist.PrefixStore("inner", store)
        self.inner: Any = dist.ProcessGroupGloo(inner_store, rank, size, timeout=timeout)

    # What torch calls a group is kept by its backends, of which this group has none.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def getBackendName(self) -> str:  # noqa: N802  torch's own name
        return NAME

    # Collectives ----------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Done:
        copies = to_cpu(tensors)
        self.inner.broadcast(copies, opts).wait()
        return done(copy_back(copies, tensors))

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Done:
        copies = [self._reduced(copy, opts) for copy in to_cpu(tensors)]
        return done(copy_back(copies, tensors))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Done:
        return self.allreduce(tensors, opts)

    def _reduced(self, copy: Tensor, opts: Any) -> Tensor:
        """The sum (mean, largest, ...) of a tensor on the CPU over all ranks, in place."""
        is_mean = opts.reduceOp == dist.ReduceOp.AVG
        plain: Any = dist.AllreduceOptions()
        plain.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        self.inner.allreduce([copy], plain).wait()
        if is_mean:  # which gloo does not have
            copy.div_(self.size())
        return copy

    def _gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, on the CPU."""
        (copy,) = to_cpu([tensor])
        parts = [torch.empty_like(copy) for _ in range(self.size())]
        self.inner.allgather([parts], [copy]).wait()
        return parts

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Done:
        for output, tensor in zip(outputs, inputs, strict=True):
            copy_back(self._gathered(tensor), output)
        return done(outputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Done:
        whole = torch.cat([part.flatten() for part in self._gathered(tensor)])
        output.copy_(whole.view(output.shape))
        return done([output])

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Done:
        return one_by_one(self._allgather_base, outputs, inputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Done:
        for output, parts in zip(outputs, inputs, strict=True):
            for rank, part in enumerate(to_cpu(parts)):
                reduced = self._reduced(part, opts)
                if rank == self.rank():
                    output.copy_(reduced)
        return done(outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Done:
        (copy,) = to_cpu([tensor])
        parts = self._reduced(copy.flatten(), opts).chunk(self.size())
        mine = parts[self.rank()]
        output.copy_(mine.view(output.shape))
        return done([output])

    reduce_scatter_single = _reduce_scatter_base  # its name from torch 2.13 on

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Done:
        return one_by_one(self._reduce_scatter_base, outputs, inputs, opts)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any,
    ) -> Done:
        copy = tensor.cpu()
        into = torch.empty_like(output, device="cpu")
        self.inner.alltoall_base(into, copy, output_sizes, input_sizes, opts).wait()
        output.copy_(into)
        return done([output])

    all_to_all_single = alltoall_base  # its name from torch 2.13 on

    def barrier(self, opts: Any = None) -> Done:
        self.inner.barrier().wait()
        return done([])

    # Between two ranks ----------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Done:
        copies = to_cpu(tensors)
        work = self.inner.send(copies, rank, tag)
        # The copies live until they are sent.
        return Done(lambda: (work.wait(), copies), tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Done:
        into = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        work = self.inner.recv(into, rank, tag)
        return Done(lambda: (work.wait(), copy_back(into, tensors)), tensors)


def one_by_one(
    collective: Callable[[Tensor, Tensor, Any], Done],
    outputs: list[Tensor],
    inputs: list[Tensor],
    opts: Any,
) -> Done:
    for output, tensor in zip(outputs, inputs, strict=True):
        collective(output, tensor, opts)
    return done(outputs)


def to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies, in memory of their own."""
    return [tensor.detach().contiguous().to("cpu", copy=True) for tensor in tensors]


def copy_back(copies: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    for copy, tensor in zip(copies, tensors, strict=True):
        tensor.detach().copy_(copy)
    return list(tensors)


def register(device: str) -> None:
    """Makes the backend known to torch, for tensors of a kind of device."""
    dist.Backend.register_backend(NAME, GlooOnGpu, devices=[device])


def install(device: str = "cuda", instead_of: str = "nccl") -> None:
    """From now on a job that asks for a backend gets this one; tests put it in gloo's place, on a
    CPU."""
    import meshtrain.mesh

    register(device)
    plain: Any = dist.init_process_group

    def init_process_group(backend: str | None = None, **keys: Any) -> None:
        if backend == instead_of:
            backend = NAME
            # Bound to a GPU, torch would split groups as NCCL does.
            keys.pop("device_id", None)
        plain(backend, **keys)

    for place in (distributed_c10d, dist):
        vars(place)["init_process_group"] = init_process_group
    # torch sets the time limit of its own backends only.
    meshtrain.mesh._set_timeout = lambda group, timeout: None


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "--on-cpu":  # as tests have it
        arguments = arguments[1:]
        install("cpu", instead_of="gloo")
    else:
        install()
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
