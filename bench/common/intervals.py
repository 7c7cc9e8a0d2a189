"""Confidence intervals over prompts: how much a figure would vary with other prompts of the same kind."""

from collections.abc import Sequence

import numpy as np

#: The share of resampled figures inside an interval, and the number of resamples.
LEVEL, DRAWS = 0.95, 2000


def ratio_interval(
    above: Sequence[float],
    below: Sequence[float],
    base_above: Sequence[float] | None = None,
    base_below: Sequence[float] | None = None,
) -> list[float]:
    """The interval of ``sum(above) / sum(below)``, divided by the base's ratio if a base is given.

    A percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13): prompts are
    drawn with replacement, each with all of its values. The interval does not cover noise between runs.

    Args:
        above: The numerator of each prompt.
        below: The denominator of each prompt.
        base_above: The base's numerator of each prompt.
        base_below: The base's denominator of each prompt.

    Returns:
        The lower and the upper end of the interval.
    """
    drawn = np.random.default_rng(0).integers(len(above), size=(DRAWS, len(above)))

    def ratios(top: Sequence[float], bottom: Sequence[float]) -> np.ndarray:
        return np.asarray(top)[drawn].sum(1) / np.asarray(bottom)[drawn].sum(1)

    found = ratios(above, below)
    if base_above is not None and base_below is not None:
        found = found / ratios(base_above, base_below)
    tail = 100 * (1 - LEVEL) / 2
    return np.percentile(found, [tail, 100 - tail]).tolist()
