"""Quantile Balancing: the selection bias that gives every expert the same load (report 2.3.3, appendices C and D).

A training step is: `cutoff` and `count` in every micro-batch with one frozen bias, the integer counts added up over
micro-batches and ranks, then `centre(quantiles(...))` once. `exact` is the reference that needs all scores at once.

Shapes: N tokens, E experts, B bins.
"""

from kernels.quantile.histogram import centre, count, cutoff, limits, quantiles
from kernels.quantile.reference import exact

__all__ = ["centre", "count", "cutoff", "exact", "limits", "quantiles"]
