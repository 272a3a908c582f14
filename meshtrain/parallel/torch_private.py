"""What is called of torch that torch does not promise to keep, as it is in torch 2.11 to 2.13."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import _get_grad_fn_or_grad_acc
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes


def end_fsdp_backward(model: FSDPModule) -> None:
    """What FSDP does at the end of a backward of its own: adds gradients up in the type in which they are reduced and,
    if that backward was said to be the last, sends them."""
    model._get_fsdp_state()._root_post_backward_final_callback()


def enable_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Lets a group's ranks reach each other's memory, and brings the operators that use it."""
    from torch.distributed import _symmetric_memory

    enable = getattr(_symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:  # torch 2.13 no longer asks for it, and later ones may lack it
        enable(group.group_name)


def accumulates(parameter: Tensor) -> bool:
    """Whether the backward that runs now adds to a parameter's gradient; one of `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(_get_grad_fn_or_grad_acc(parameter))
    except RuntimeError:  # this very gradient is what `torch.autograd.grad` was asked for
        return False


def unseen() -> AbstractContextManager[object]:
    """What runs inside is seen by nobody who watches operators (TorchDispatchMode)."""
    return _disable_current_modes()
