"""How a request is sampled and when it stops, checked; imports no JAX."""

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens (ties with the k-th are kept); None keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; None keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest; None keeps all.
        seed: Seed of the request's noise; without one, a seed is drawn once.
        max_tokens: Most tokens to generate.
        stop: Strings that end the text; the first one found is cut off, with all that follows. Special tokens
            are no text: they belong in ``stop_token_ids``.
        stop_token_ids: Tokens that end the sequence; the one found is kept in the token ids.
        ignore_eos: Do not stop at the target's end-of-sequence tokens.

    Raises:
        ValueError: A setting is out of its range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = 256
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Checks every setting."""
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            raise ValueError(f"temperature must be a finite number of at least 0, not {self.temperature!r}")
        if self.top_k is not None and not (_is_int(self.top_k) and self.top_k >= 1):
            raise ValueError(f"top_k must be an integer of at least 1, or None, not {self.top_k!r}")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie in (0, 1], or be None, not {self.top_p!r}")
        if self.min_p is not None and not (_is_number(self.min_p) and 0 <= self.min_p <= 1):
            raise ValueError(f"min_p must lie in [0, 1], or be None, not {self.min_p!r}")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed < 2**64):
            raise ValueError(f"seed must be an integer in [0, 2**64), or None, not {self.seed!r}")
        if not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise ValueError(f"max_tokens must be an integer of at least 1, not {self.max_tokens!r}")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must hold strings that are not empty, not {self.stop!r}")
        if not all(_is_int(token) and token >= 0 for token in stop_token_ids):
            raise ValueError(f"stop_token_ids must hold token ids, not {self.stop_token_ids!r}")


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(64)


def _as_tuple(name: str, values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a sequence, not {values!r}")
    return tuple(values)


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.floating | np.integer) and not isinstance(value, bool)
