"""Settings of a training run, and its optimiser and learning rate."""

from collections.abc import Mapping
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
        micro_batch: Sequences per device and pass; None is the device's whole share of the batch.
        weight_decay: Weight decay of matrices; vectors are not decayed.
        clip: Largest global norm of the gradient.
        save_every: Steps between checkpoints.
        evaluate_every: Steps between evaluations on held-out data.
        log_every: Steps between writes of the log.
    """

    steps: int
    batch: int
    learning_rate: float
    warmup: int
    micro_batch: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    save_every: int = 500
    evaluate_every: int = 250
    log_every: int = 20

    def check(self) -> list[str]:
        """Messages about all settings that are out of range."""
        least = {
            "steps": 1, "batch": 1, "warmup": 0, "learning_rate": 0, "weight_decay": 0,
            "save_every": 1, "evaluate_every": 1, "log_every": 1,
        }  # fmt: skip
        wrong = below_least("fit", self, least)
        if self.micro_batch is not None and self.micro_batch < 1:
            wrong.append(f"fit.micro_batch must be at least 1, not {self.micro_batch}")
        if not self.warmup < max(self.steps, 1):
            wrong.append(f"fit.warmup must be below {self.steps}, the steps, not {self.warmup}")
        if not self.clip > 0:
            wrong.append(f"fit.clip must be above 0, not {self.clip}")
        return wrong

    def parts(self, devices: int) -> int:
        """The number of gradient accumulation steps of a batch.

        Args:
            devices: Number of devices with different sequences; a group that shards the target counts as one.

        Raises:
            ValueError: The batch does not divide into micro-batches over the devices, or a setting is out of
                range.
        """
        if wrong := self.check():
            raise ValueError("; ".join(wrong))
        at_once = devices * (self.micro_batch or max(self.batch // devices, 1))
        if self.batch % at_once:
            size = "" if self.micro_batch is None else f" of {self.micro_batch}"
            raise ValueError(
                f"a batch of {self.batch} sequences does not divide into micro-batches{size} on {devices} "
                f"devices; a multiple of {at_once} would"
            )
        return self.batch // at_once


def below_least(table: str, settings: object, least: Mapping[str, float]) -> list[str]:
    """Messages about the settings of a recipe's table that are below their ``least`` values."""
    values = {name: getattr(settings, name) for name in least}
    return [
        f"{table}.{name} must be at least {to}, not {values[name]}"
        for name, to in least.items()
        if values[name] < to
    ]


def schedule(fit: Fit) -> optax.Schedule:
    """The learning rate by step: linear warm-up, then a cosine to a tenth of the peak."""
    return optax.warmup_cosine_decay_schedule(
        0.0, fit.learning_rate, fit.warmup, fit.steps, end_value=0.1 * fit.learning_rate
    )


def make_optimizer(fit: Fit) -> optax.GradientTransformation:
    """AdamW with clipping and the `schedule`; vectors (norms) are not decayed."""
    return optax.chain(
        optax.clip_by_global_norm(fit.clip),
        optax.adamw(
            schedule(fit),
            b2=0.95,
            weight_decay=fit.weight_decay,
            mask=partial(jax.tree.map, lambda w: w.ndim > 1),
        ),
    )
