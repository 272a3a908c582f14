"""Attention over `cp` that is called elsewhere than a `cp_plan` says: the calls of a forward are
counted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from meshtrain.attention import AttentionContext
from meshtrain.errors import InputError


def watch_attention(model: nn.Module, attention: Sequence[str]) -> None:
    """Makes the first forward fail if it calls attention elsewhere than once in each of these
    modules. A model that was compared with the plain one needs none of this."""
    forward = model.forward

    def first(*inputs: Any, **named: Any) -> Any:
        model.forward = forward
        context = named["documents"] if "documents" in named else inputs[2]
        with misplaced_calls(model, attention, context) as misplaced:
            output = forward(*inputs, **named)
        if misplaced:
            raise InputError(
                f"with cp: {misplaced[0]}: mend the model or its cp_plan, or use cp: 1"
            )
        return output

    model.forward = first


@contextmanager
def misplaced_calls(
    model: nn.Module, modules: Sequence[str], context: AttentionContext
) -> Iterator[list[str]]:
    """Yields a list of problems: attention calls outside these modules, and modules that do not
    call it just once."""
    misplaced: list[str] = []
    calls = [0]  # number of calls outside these modules, and in each running one
    kind: Any = type(context)  # not the record itself: FSDP gives each unit a copy
    attend = kind.attend

    def count(*arguments: Any) -> Tensor:
        calls[-1] += 1
        if len(calls) == 1:
            misplaced.append(
                "attention is called elsewhere than in the modules that the cp_plan names"
            )
        return attend(*arguments)

    def counted(name: str, forward: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(0)
            output = forward(*args, **kwargs)
            count = calls.pop()
            if count != 1:
                misplaced.append(
                    f"{name} calls attention {count} times, and what the cp_plan names has to call "
                    "it once"
                )
            return output

        return run

    with ExitStack() as stack:
        for name in modules:
            module = model.get_submodule(name)
            stack.callback(setattr, module, "forward", module.forward)
            module.forward = counted(name, module.forward)
        kind.attend = count
        stack.callback(setattr, kind, "attend", attend)
        yield misplaced
