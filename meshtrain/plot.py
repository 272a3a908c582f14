"""The loss plot of a run folder, under the name that docs/metrics.md uses:
`meshtrain.plot.plot_loss`."""

from meshtrain.metrics.plot import plot_loss

__all__ = ["plot_loss"]
