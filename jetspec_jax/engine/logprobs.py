"""Log-probabilities of tokens as callers get them, under vLLM's names."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.engine.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """What is told of one token at one position.

    Attributes:
        logprob: Its log-probability under the target's own distribution.
        rank: 1 for the likeliest of all tokens.
        decoded_token: Its text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenLogprobs(NamedTuple):
    """What the device told of one token.

    Attributes:
        chosen: Its log-probability.
        rank: Its rank.
        tokens: The likeliest tokens there, best first.
        likeliest: Their log-probabilities.
    """

    chosen: float
    rank: int
    tokens: list[int]
    likeliest: list[float]


def rows_of(told: Any) -> list[TokenLogprobs]:
    """The rows of a `jetspec_jax.decode.logprobs.Logprobs` of one axis of tokens, on the host."""
    columns = (np.asarray(column).tolist() for column in told)
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


def by_round(told: Any, rounds: np.ndarray, place: int) -> Iterator[Any]:
    """What a dispatch told of one slot in some of its rounds: None for each where it told nothing."""
    for number in np.flatnonzero(rounds):
        yield None if told is None else tuple(column[number, place] for column in told)


def describe(
    tokens: Sequence[int], rows: Sequence[TokenLogprobs], count: int, detokenizer: Detokenizer | None
) -> list[dict[int, Logprob]]:
    """What is told of each token, and of the likeliest ones at its place: mappings by token.

    Args:
        tokens: The tokens.
        rows: What the device told of each.
        count: How many of the likeliest; the token itself is there anyway, and first.
        detokenizer: The tokenizer's, or None.
    """

    def text_of(token: int) -> str | None:
        return None if detokenizer is None else detokenizer.token_text(token)

    described = []
    for token, row in zip(tokens, rows, strict=True):
        own = {token: Logprob(row.chosen, row.rank, text_of(token))}
        best = zip(row.tokens[:count], row.likeliest[:count], strict=True)
        for rank, (other, value) in enumerate(best, start=1):
            own[other] = Logprob(value, rank, text_of(other))
        described.append(own)
    return described
