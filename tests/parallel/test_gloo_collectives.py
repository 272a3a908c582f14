"""Collectives over gloo: the order in which their sends and receives are posted."""

from types import SimpleNamespace

import torch

from meshtrain.parallel import gloo_collectives


def test_sends_are_posted_before_receives(monkeypatch):
    """A rank that writes to a connection at which a message arrives makes gloo's thread poll."""
    posted = []
    monkeypatch.setattr(
        gloo_collectives, "start_send", lambda tensor, group, target: posted.append(("to", target))
    )
    monkeypatch.setattr(
        gloo_collectives,
        "start_receive",
        lambda tensor, group, source: posted.append(("from", source)),
    )
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 4)
    parts = [torch.ones(2) for _ in range(4)]
    gloo_collectives.start_exchange(parts, [part.clone() for part in parts], group)
    assert posted == [("to", 2), ("to", 3), ("to", 0), ("from", 0), ("from", 3), ("from", 2)]
