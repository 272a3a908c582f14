"""torch.compile of blocks: whether to compile, where compiled code is cached, and how a block's
forward is compiled."""

import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch
from torch import nn

from meshtrain.data.cache import cache_folder
from meshtrain.job.storage import make_private_folder, warn
from meshtrain.parallel.torch_private import (
    allow_side_effects_in_recomputation,
    breaks_graph,
    mend_attention_shapes,
    replace_parameters,
    to_local,
)

CACHE = "TORCHINDUCTOR_CACHE_DIR"


class CompileChoice(NamedTuple):
    """Whether blocks are compiled, and why `auto` is false on a GPU."""

    compiles: bool
    obstacle: str | None = None

    def __str__(self) -> str:
        text = "blocks are compiled" if self.compiles else "blocks are not compiled"
        return f"{text}: {self.obstacle}" if self.obstacle else text


def choose_compile(
    setting: bool | str,
    device: torch.device,
    splits_backward: bool,
    *,
    has_tools: bool = False,
) -> CompileChoice:
    """Resolves `auto` for a device; True and False are kept.

    Args:
        splits_backward: the pipeline's schedule computes weight gradients later, but a compiled
            block computes all gradients at once.
        has_tools: `device` is taken to have what the compiler needs: this machine only traces.
    """
    if setting != "auto" or device.type != "cuda":
        return CompileChoice(setting is True)
    if splits_backward:
        late = "the schedule computes gradients of weights later, a compiled block all at once"
        return CompileChoice(False, late)
    if has_tools:
        return CompileChoice(True)
    obstacle = missing_tools(torch.cuda.get_device_capability(device))
    return CompileChoice(obstacle is None, obstacle)


def missing_tools(capability: tuple[int, int]) -> str | None:
    """What the compiler lacks to build kernels for a GPU: Triton has to support it, and builds
    launchers in C."""
    if capability < (7, 0):
        major, minor = capability
        return f"Triton needs compute capability 7.0, and this GPU has {major}.{minor}"
    if find_spec("triton") is None:
        return "Triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return "Triton finds no C compiler: install gcc, or name one in CC"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        return f"Triton needs {header}, of the package python3-dev or python3-devel"
    return None


def keep_compiled_code(folder: Path) -> None:
    """Caches compiled code where later starts find it, unless the environment names a folder: in
    `folder` if that is this user's alone, else in the user's own cache folder. torch's own default
    is a temporary folder. torch itself detects stale entries, but it runs whatever code it finds:
    nobody else may be able to put some there."""
    if CACHE in os.environ:
        named = Path(os.environ[CACHE])
        # A model that imports parts of the compiler has already put torch's default there.
        is_default = named.parent == Path(gettempdir()) and named.name.startswith("torchinductor_")
        if not is_default:
            return
    users_own = cache_folder(None)
    first_problem: OSError | None = None
    for parent in dict.fromkeys((folder, users_own)):
        compiled = parent / f"compiled-torch-{torch.__version__}"
        try:
            made = make_private_folder(compiled, may_be_shared=parent != users_own)
        except OSError as error:
            first_problem = first_problem or error
        else:
            os.environ[CACHE] = str(made)
            return
    warn(f"compiled code is not kept for the next start: {first_problem}")


def compile_block(
    block: nn.Module,
    forward: Callable,
    without: Collection[nn.Module] = (),
    one_graph: bool = False,
) -> Callable:
    """The forward of `block`, compiled at its first call.

    While the forward runs, DTensor parameters are replaced by this rank's local parts, because a
    graph that contains a recomputation cannot hold DTensors. Autograd passes gradients on to the
    parameters themselves. Modules in `without` are skipped: they are not compiled, and FSDP gathers
    them separately. `one_graph`: the first call raises one of `breaks_graph` if the forward is not
    a single graph.
    """
    mend_attention_shapes()
    compiled = torch.compile(forward, fullgraph=one_graph)
    modules = [module for module in block.modules() if module not in without]
    # Column-parallel layers pass each other results that they compute together, and restore their
    # state afterwards. Unless such side effects are allowed inside a recomputation, no part of the
    # block would be compiled.
    allowed = allow_side_effects_in_recomputation()

    def run(*args: Any, **kwargs: Any) -> Any:
        with replace_parameters(modules, to_local), allowed:
            return compiled(*args, **kwargs)

    return run


def while_one_graph(whole: Callable, plain: Callable, name: str) -> Callable:
    """Calls `whole` until the compiler finds that it is not one graph or that there are too many
    kinds of layers, and `plain` from then on. Training and evaluation have separate graphs: if one
    falls back, the other stays compiled.

    Compiling a recomputed forward in pieces is no alternative: if the compiler gives up between the
    two, compiled and plain code save the same tensors in different orders, and the checkpoint would
    return the wrong ones.
    """
    compiles = {"training": True, "evaluation": True}

    def run(*args: Any, **kwargs: Any) -> Any:
        trains = torch.is_grad_enabled()
        graph = "training" if trains else "evaluation"
        if not compiles[graph]:
            return plain(*args, **kwargs)
        try:
            return whole(*args, **kwargs)
        except breaks_graph() as error:
            # It is raised before anything has run.
            compiles[graph] = False
            state = "recomputed and not compiled" if trains else "not compiled without gradients"
            reason = str(error).strip().split("\n")[0]
            warnings.warn(f"{name} is {state}, which takes one graph: {reason}", stacklevel=2)
        return plain(*args, **kwargs)

    return run
