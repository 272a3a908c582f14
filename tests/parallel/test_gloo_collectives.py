"""Collectives over gloo: the order in which their sends and receives are posted."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshtrain.parallel import gloo_collectives


def test_sends_are_posted_before_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that writes to a connection at which a message arrives makes gloo's thread poll."""
    posted: list[tuple[str, int]] = []

    def send(tensor: Tensor, group: Any, target: int) -> None:
        posted.append(("to", target))

    def receive(tensor: Tensor, group: Any, source: int) -> None:
        posted.append(("from", source))

    monkeypatch.setattr(gloo_collectives, "start_send", send)
    monkeypatch.setattr(gloo_collectives, "start_receive", receive)
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    parts = [torch.ones(2) for _ in range(4)]
    gloo_collectives.start_exchange(parts, [part.clone() for part in parts], group)
    assert posted == [("to", 2), ("to", 3), ("to", 0), ("from", 0), ("from", 3), ("from", 2)]
