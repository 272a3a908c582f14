"""What torch does not promise to keep is there, and what it may drop is not missed."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory

from meshtrain.parallel.torch_private import enable_symmetric_memory, try_symmetric_memory

GROUP = SimpleNamespace(group_name="7")


def test_symmetric_memory_is_enabled_by_torchs_that_ask_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(_symmetric_memory, "enable_symm_mem_for_group", asked.append, raising=False)
    enable_symmetric_memory(GROUP)
    assert asked == ["7"]
    monkeypatch.delattr(_symmetric_memory, "enable_symm_mem_for_group")
    enable_symmetric_memory(GROUP)
    assert asked == ["7"]


@pytest.mark.parametrize("together", [False, True])
def test_the_half_of_sharing_memory_that_a_rank_does_alone_waits_for_nobody(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **named: object) -> None:
        raise RuntimeError("not permitted\nin this container")

    halves = {False: "empty", True: "get_symm_mem_workspace"}
    monkeypatch.setattr(
        _symmetric_memory, "enable_symm_mem_for_group", lambda name: None, raising=False
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for half, name in halves.items():
        monkeypatch.setattr(
            _symmetric_memory, name, refuse if half == together else lambda *args, **named: None
        )
    assert try_symmetric_memory(GROUP, together) == "not permitted"
    assert try_symmetric_memory(GROUP, not together) is None
