"""How the global batch lies on the data ranks, in numbers and as one line for people.

The global batch is part of the experiment and the layout is not, so nothing has to divide: a rank's share and the
accumulation follow from the number of data ranks, and what does not fit is padding without valid tokens.
"""

from dataclasses import dataclass

from meshtrain.data.order import microbatches


@dataclass(frozen=True)
class BatchShape:
    """A step of `global_size` samples on `data_ranks` ranks, in forwards of `micro_size` samples on each."""

    global_size: int
    micro_size: int
    data_ranks: int

    @property
    def accumulation(self) -> int:
        """Forwards per step, the same on every rank."""
        return microbatches(self.global_size, self.micro_size, self.data_ranks)

    @property
    def shares(self) -> tuple[int, int]:
        """The samples of the rank with the fewest and of the rank with the most."""
        fewest, left = divmod(self.global_size, self.data_ranks)
        return fewest, fewest + (left > 0)

    @property
    def idle(self) -> float:
        """The share of the computed samples that are padding, from 0 to 1."""
        return 1 - self.global_size / (self.data_ranks * self.accumulation * self.micro_size)


def describe_batch(global_size: int, micro_size: int, data_ranks: int) -> str:
    """One line: `global batch 512 = 8 per rank x 32 data ranks x 2 accumulation`, 8 being the samples of a forward.

    Where shares are uneven, or no multiple of `micro_size`, the line says what a rank has and how much is padding.

    Raises:
        ValueError: a number below 1.
    """
    batch = BatchShape(global_size, micro_size, data_ranks)
    accumulation, (fewest, most) = batch.accumulation, batch.shares
    ranks = f"{data_ranks} data rank{'s' * (data_ranks != 1)}"
    if batch.idle == 0:
        return f"global batch {global_size} = {micro_size} per rank x {ranks} x {accumulation} accumulation"
    share = f"{fewest} or {most} samples" if most > fewest else f"{most} sample{'s' * (most != 1)}"
    return (
        f"global batch {global_size} over {ranks}: {share} a rank, {accumulation} accumulation of {micro_size}, "
        f"{100 * batch.idle:.2g} % of the slots idle"
    )
