"""Everything that judges a user's model: `check_model` is the one door to it.

The layout is not part of the experiment. What a model may do that would make it so is refused
before the first step, or by the first forward: it computes with the other samples of a batch, its
plan splits what belongs together, it keeps something between forwards. `checks.py` is the table of
all such checks, with the moment at which each is made.

The expensive ones run the model in two ways and compare values (`comparison.py`). They are for a
model that is not one of meshtrain's own, whose layouts the parity tests compare
(`parallel.verify`). The others look at kinds of modules, or at a forward without values, and are
always made.
"""

from meshtrain.parallel.verify.checks import check_model, needs_sample
from meshtrain.parallel.verify.subject import Moment, Subject, compares, is_ours

__all__ = ["Moment", "Subject", "check_model", "compares", "is_ours", "needs_sample"]
