"""Intervals over prompts: how much a figure would vary with other prompts of the same kind."""

from collections.abc import Sequence

import numpy as np

#: The share of resampled figures that lies inside, and how often prompts are drawn anew.
LEVEL, DRAWS = 0.95, 2000


def ratio_interval(
    above: Sequence[float],
    below: Sequence[float],
    base_above: Sequence[float] | None = None,
    base_below: Sequence[float] | None = None,
) -> list[float]:
    """The interval of ``sum(above) / sum(below)``, over that of a base if there is one, of all prompts.

    A percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13): prompts are
    drawn with replacement, each with all that belongs to it. It says nothing of noise between runs.

    Args:
        above: Of each prompt.
        below: Likewise.
        base_above: What the ratio is compared with, of the same prompts.
        base_below: Likewise.

    Returns:
        The lower and the upper end.
    """
    drawn = np.random.default_rng(0).integers(len(above), size=(DRAWS, len(above)))

    def ratios(top: Sequence[float], bottom: Sequence[float]) -> np.ndarray:
        return np.asarray(top)[drawn].sum(1) / np.asarray(bottom)[drawn].sum(1)

    found = ratios(above, below)
    if base_above is not None and base_below is not None:
        found = found / ratios(base_above, base_below)
    tail = 100 * (1 - LEVEL) / 2
    return np.percentile(found, [tail, 100 - tail]).tolist()
