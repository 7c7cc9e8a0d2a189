"""Calibration of draft scores: how often the target chooses what a head says, and the scales that fit best.

The scale b_d of `DraftScoring` is fitted by maximum likelihood: for each draft row below the target's own
tokens, which candidate did the target choose, if any. Scales do not change the order of a row, so a few
passes over the same texts give the likelihood of every scale.

Shapes: A anchors, D draft depth, K candidates, G scales.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from jetspec_jax.checkpoint.files import replacing
from jetspec_jax.config import SCALE_BANDS, DraftScales
from train.head.replay import Drafts

#: The scales whose likelihoods are computed; between them its logarithm is a parabola of the scale's.
SCALES = tuple(2 ** (step / 3) for step in range(-6, 7))
#: Fewer rows of a depth fit no scale: the depth takes that of the one before.
LEAST_ROWS = 50
#: Bands of temperatures whose mean scales differ by more than this factor have a row each.
ALIKE = 1.1
#: Edges of the classes of said probabilities.
EDGES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0)


class Chosen(NamedTuple):
    """The target's choices at the draft rows below its own tokens.

    Attributes:
        said: The probability of each candidate.
        place: Which candidate the target chose; K for none of them.
        reached: Whether all tokens above are candidates, so that a tree can reach the row.
    """

    said: Float[np.ndarray, "A D K"]
    place: Int[np.ndarray, "A D"]
    reached: Bool[np.ndarray, "A D"]


class Curve(NamedTuple):
    """Said probabilities and observed shares of a depth's candidates, by class of probability.

    Attributes:
        counts: Candidates of each class.
        said: Mean probability.
        observed: Share of them that the target chose.
    """

    counts: Int[np.ndarray, "classes"]
    said: Float[np.ndarray, "classes"]
    observed: Float[np.ndarray, "classes"]


def chosen_along(drafts: Drafts) -> Chosen:
    """The target's choices at every row of some drafts."""
    candidates, following = drafts.candidates, drafts.following
    tokens, anchors = np.asarray(candidates.tokens), np.arange(len(following))
    same, count = tokens == following[:, :, None], tokens.shape[2]
    place = np.where(same.any(axis=2), same.argmax(axis=2), count)
    known = np.logical_and.accumulate(place < count, axis=1)
    reached = np.concatenate([np.ones((len(following), 1), bool), known[:, :-1]], axis=1)
    log_probs = np.asarray(candidates.log_probs)
    if candidates.pairs is not None:
        above = np.concatenate([np.zeros((len(following), 1), int), place[:, :-1] % count], axis=1)
        rows = np.arange(following.shape[1])[None, :]
        log_probs = np.asarray(candidates.pairs)[anchors[:, None], rows, above]
    return Chosen(np.exp(log_probs), place, reached)


def log_likelihoods(chosen: Chosen) -> tuple[Float[np.ndarray, "D"], Int[np.ndarray, "D"]]:
    """The choices' log-likelihood at each depth, and the number of rows."""
    rest = np.maximum(1 - chosen.said.sum(axis=2, keepdims=True), 0)
    of_all = np.concatenate([chosen.said, rest], axis=2)
    # Rounding leaves no less for what is improbable.
    probs = np.maximum(np.take_along_axis(of_all, chosen.place[:, :, None], axis=2)[:, :, 0], 1e-7)
    return np.sum(np.log(probs), axis=0, where=chosen.reached), chosen.reached.sum(axis=0)


def best_scales(likelihoods: Float[np.ndarray, "G D"], rows: Int[np.ndarray, "D"]) -> list[float]:
    """The scale of each depth with the highest likelihood; `SCALES` has the G scales."""
    logs, found = np.log(SCALES), []
    for column, count in zip(likelihoods.T, rows, strict=True):
        if count < LEAST_ROWS:
            found.append(found[-1] if found else 1.0)
            continue
        best = int(np.argmax(column))
        place = logs[best]
        if 0 < best < len(logs) - 1:
            before, at, after = column[best - 1 : best + 2]
            place += (logs[1] - logs[0]) / 2 * (before - after) / (before - 2 * at + after)
        found.append(round(float(np.exp(place)), 4))
    return found


def fit_bands(
    tables: Mapping[float, Float[np.ndarray, "G D"]], rows: Mapping[float, Int[np.ndarray, "D"]]
) -> DraftScales:
    """The scales of all temperatures together, or of each band of them, if bands differ by over 10 %."""

    def fit(temperatures: Collection[float]) -> list[float]:
        parts = [np.sum([of[t] for t in temperatures], axis=0) for of in (tables, rows)]
        return best_scales(*parts)

    together = fit(tables.keys())
    number = {t: int(np.searchsorted(SCALE_BANDS, t)) for t in tables}
    bands = [[t for t in tables if number[t] == band] for band in range(1 + len(SCALE_BANDS))]
    apart = [fit(band) if band else together for band in bands]
    weights = np.sum([*rows.values()], axis=0)
    means = [float(np.average(np.log(row), weights=weights)) for row in apart] if weights.any() else [0.0]
    if max(means) - min(means) <= math.log(ALIKE):
        return tuple(together)
    return tuple(map(tuple, apart))


def curves_of(chosen: Chosen) -> list[Curve]:
    """A curve for each depth."""
    kinds = np.clip(np.digitize(chosen.said, EDGES) - 1, 0, len(EDGES) - 2)
    hits, curves = chosen.place[:, :, None] == np.arange(chosen.said.shape[2]), []
    for depth in range(chosen.place.shape[1]):
        rows = chosen.reached[:, depth]
        kind = kinds[rows, depth].ravel()

        def total(values: np.ndarray, kind: np.ndarray = kind) -> np.ndarray:
            return np.bincount(kind, values.ravel(), minlength=len(EDGES) - 1)

        counts = np.bincount(kind, minlength=len(EDGES) - 1)
        most = np.maximum(counts, 1)
        curves.append(Curve(counts, total(chosen.said[rows, depth]) / most, total(hits[rows, depth]) / most))
    return curves


def error_of(curves: Sequence[Curve]) -> float:
    """The sum over classes of what was said and not observed, or observed and not said, over all said."""
    apart = sum(float(np.sum(curve.counts * np.abs(curve.said - curve.observed))) for curve in curves)
    return apart / max(sum(float(np.sum(curve.counts * curve.said)) for curve in curves), 1e-9)


def table_of(curves: Sequence[Curve]) -> list[dict[str, object]]:
    """A row for each depth: its candidates, and what was said and observed of all of them, in all."""
    return [
        {
            "depth": depth,
            "said": round(float(np.sum(curve.counts * curve.said)), 1),
            "observed": int(np.round(np.sum(curve.counts * curve.observed))),
            "error": round(error_of([curve]), 3),
        }
        for depth, curve in enumerate(curves, start=1)
    ]


def draw_calibration(panels: Mapping[str, Sequence[Curve]], path: Path, title: str) -> None:
    """Writes a picture: a panel for each name, with a curve of observed shares for some depths."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 4.4), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (name, curves) in zip(axes, panels.items(), strict=True):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for depth, curve in enumerate(curves, start=1):
            if depth in (1, 2, 4, 8, 16):
                enough = curve.counts >= 20
                shown = curve.said[enough], curve.observed[enough]
                axis.plot(*shown, marker="o", markersize=3, label=f"depth {depth}")
        axis.set_title(f"{name}: error {error_of(curves):.3f}", fontsize=10)
        axis.set_xlabel("probability said")
        axis.set_ylabel("share that the target chose")
        axis.legend(loc="upper left", fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.removeprefix(".") or "png")
