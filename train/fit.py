"""How weights are fitted: steps, rates, and the optimiser that they make."""

from dataclasses import dataclass
from functools import partial

import jax
import optax


@dataclass(frozen=True)
class Fit:
    """One training run.

    Attributes:
        steps: Optimiser steps.
        batch: Sequences per step, on all devices together.
        learning_rate: Peak; warmed up linearly, then a cosine to a tenth.
        warmup: Steps of warm-up.
        accumulation: Parts of a batch that are computed one after the other.
        weight_decay: Of matrices; vectors are not decayed.
        clip: Largest global norm of the gradient.
        save_every: Steps between checkpoints.
        evaluate_every: Steps between evaluations on held-out data.
        log_every: Steps between writes of the log.
    """

    steps: int
    batch: int
    learning_rate: float
    warmup: int
    accumulation: int = 1
    weight_decay: float = 0.1
    clip: float = 1.0
    save_every: int = 500
    evaluate_every: int = 250
    log_every: int = 20

    def check(self, devices: int) -> None:
        """Raises ValueError naming what is out of its range for a number of devices."""
        for name in ("steps", "batch", "accumulation", "save_every", "evaluate_every", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"fit.{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(f"fit.warmup must lie in 0..{self.steps}, the steps, not {self.warmup}")
        if self.batch % (self.accumulation * devices):
            raise ValueError(
                f"a batch of {self.batch} sequences does not divide into {self.accumulation} parts "
                f"over {devices} devices; a multiple of {self.accumulation * devices} would"
            )


def schedule(fit: Fit) -> optax.Schedule:
    """The learning rate by step: linear warm-up, then a cosine to a tenth of the peak."""
    return optax.warmup_cosine_decay_schedule(
        0.0, fit.learning_rate, fit.warmup, fit.steps, end_value=0.1 * fit.learning_rate
    )


def make_optimizer(fit: Fit) -> optax.GradientTransformation:
    """AdamW with clipping; vectors (norms) are not decayed."""
    return optax.chain(
        optax.clip_by_global_norm(fit.clip),
        optax.adamw(
            schedule(fit),
            b2=0.95,
            weight_decay=fit.weight_decay,
            mask=partial(jax.tree.map, lambda w: w.ndim > 1),
        ),
    )
