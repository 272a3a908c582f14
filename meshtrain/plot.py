"""The loss plot of a run's folder, as docs/metrics.md calls it: `meshtrain.plot.plot_loss`."""

from meshtrain.metrics.plot import plot_loss

__all__ = ["plot_loss"]
