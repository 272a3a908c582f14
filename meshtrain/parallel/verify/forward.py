"""Questions about a plain model's forward, answered on the meta device: what becomes of its logits,
and which adapters it calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshtrain.parallel.linear.lora import has_adapter
from meshtrain.parallel.predictions import predicting
from meshtrain.parallel.torch_private import (
    TorchDispatchMode,
    has_hooks,
    tree_leaves,
)


def gives_logits(model: nn.Module, layer: nn.Module, inputs: Sequence[Tensor | None]) -> bool:
    """Whether a plain model's output is the output of its last layer, per token, and nothing else
    is computed from it.

    `model` and `inputs` are on the meta device; False if the model does not run there."""
    tokens = inputs[0]
    assert tokens is not None
    for training in (True, False):
        watch = _UsesOfOutput()
        hook = layer.register_forward_hook(watch.take, prepend=True)  # before the model's own hooks
        try:
            with torch.set_grad_enabled(training), watch:
                output = model.train(training)(*inputs)
        except Exception:  # any error of a model that reads values of a tensor
            return False
        finally:
            hook.remove()
        is_unchanged = len(watch.outputs) == 1 and output is watch.outputs[0] and not watch.used
        if not is_unchanged or has_hooks(output) or output.shape[:-1] != tokens.shape:
            return False
    return True


class _UsesOfOutput(TorchDispatchMode):
    """Detects whether any operator uses the output of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.used = False

    def take(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append(output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if any(leaf is output for output in self.outputs):
                self.used = True
        return func(*args, **(kwargs or {}))


def idle_adapters(model: nn.Module, inputs: Sequence[Tensor | None]) -> list[str]:
    """The layers with an adapter that a forward does not call, because it uses their weights
    directly or not at all, so that their hooks never run. `model`: plain, on the meta device; empty
    if it does not run there."""
    adapted = {name: module for name, module in model.named_modules() if has_adapter(module)}
    called: set[nn.Module] = set()
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.add(module))
        for module in adapted.values()
    ]
    try:
        on_meta = [None if x is None else x.to("meta") for x in inputs]
        with torch.no_grad(), predicting(model, on_meta):
            model(*on_meta)
    except Exception:  # any error of a model that reads values of a tensor
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return [name for name, module in adapted.items() if module not in called]
