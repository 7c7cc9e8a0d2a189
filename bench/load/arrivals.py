"""Arrival times and lengths of requests, and random prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The number of parameters of each kind.
_NUMBERS = {"fixed": 1, "uniform": 2, "lognormal": 2}


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens: "128", "uniform:64:256" or "lognormal:128:0.5".

    Attributes:
        kind: fixed, uniform or lognormal.
        first: The number, the smallest number, or the median.
        second: The largest number, or the standard deviation of the logarithm.
    """

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parses a command-line value; raises ValueError if its form or a number is invalid."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            lengths = cls(kind, *map(float, numbers))
            fine = len(numbers) == _NUMBERS[kind] and lengths.first >= 1 and lengths.second >= 0
            fine = fine and math.isfinite(lengths.first + lengths.second)
            if fine and (kind != "uniform" or lengths.second >= lengths.first):
                return lengths
        except (KeyError, TypeError, ValueError):
            pass
        raise ValueError(f"lengths are N, uniform:LEAST:MOST or lognormal:MEDIAN:DEVIATION, not {text!r}")

    def draw(self, count: int, rng: np.random.Generator, most: int) -> list[int]:
        """Draws ``count`` lengths, clipped to 1..``most``."""
        if self.kind == "uniform":
            drawn = rng.integers(int(self.first), int(self.second) + 1, count)
        elif self.kind == "lognormal":
            drawn = np.rint(self.first * np.exp(self.second * rng.standard_normal(count)))
        else:
            drawn = np.full(count, self.first)
        return np.clip(drawn, 1, most).astype(int).tolist()


def poisson(rate: float, count: int, rng: np.random.Generator) -> list[float]:
    """Arrival times of ``count`` requests in seconds: a Poisson process of ``rate`` requests per second."""
    return np.cumsum(rng.exponential(1 / rate, count)).tolist()


def random_prompts(lengths: Sequence[int], vocab_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Prompts of random tokens, which therefore share no pages."""
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]
