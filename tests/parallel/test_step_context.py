"""What a forward is told by the code that runs it."""

from dataclasses import replace
from threading import Thread

import pytest
import torch

from meshtrain.loss import GlobalCount, StepTerms, real_tokens
from meshtrain.parallel.linear_cross_entropy import LossRequest, request_loss
from meshtrain.parallel.step_context import StepContext, current_context, use_context
from tests.comparing import ALONE, CPU

OUTSIDE = StepContext()
REQUEST = LossRequest(lambda: torch.zeros(2, 3, dtype=torch.int64))


def test_a_request_and_terms_are_set_one_inside_the_other() -> None:
    terms = StepTerms(GlobalCount(1, ALONE, CPU))
    with request_loss(REQUEST):
        assert current_context() == replace(OUTSIDE, loss_request=REQUEST)
        with terms.of_microbatch(2, 1):
            both = current_context()
            assert both.loss_request is REQUEST
            assert both.terms is not None
            assert both.terms.step is terms
        assert current_context() == replace(OUTSIDE, loss_request=REQUEST)
    assert current_context() == OUTSIDE


def test_a_forward_that_fails_leaves_no_context() -> None:
    with pytest.raises(ValueError, match="of the model"), request_loss(REQUEST):
        raise ValueError("of the model")
    assert current_context() == OUTSIDE


def test_threads_of_autograd_see_the_context() -> None:
    """They recompute blocks. A thread of Python stands for one: neither inherits a context."""
    seen = []
    thread = Thread(target=lambda: seen.append(real_tokens(CPU)))
    with StepTerms(GlobalCount(1, ALONE, CPU)).of_microbatch(2, 1):
        thread.start()
        thread.join()
    assert seen[0].tolist() == [[True], [False]]
    with use_context(OUTSIDE):
        assert real_tokens(CPU) is None
