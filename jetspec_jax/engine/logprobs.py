"""Log-probabilities of tokens in the form of vLLM's results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.engine.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token at a position.

    Attributes:
        logprob: Log-probability under the target's own distribution.
        rank: 1 for the likeliest of all tokens.
        decoded_token: The token's text; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


class TokenLogprobs(NamedTuple):
    """Log-probability and rank of the chosen token at one position, from the device.

    Attributes:
        tokens: The likeliest tokens, best first.
        likeliest: Their log-probabilities.
    """

    chosen: float
    rank: int
    tokens: list[int]
    likeliest: list[float]


def rows_of(logprobs: Any) -> list[TokenLogprobs]:
    """Rows of a `jetspec_jax.decode.logprobs.Logprobs` with one axis of tokens, on the host."""
    columns = (np.asarray(column).tolist() for column in logprobs)
    return [TokenLogprobs(*row) for row in zip(*columns, strict=True)]


def by_round(logprobs: Any, rounds: np.ndarray, place: int) -> Iterator[Any]:
    """Log-probabilities of one slot in each of some rounds of a dispatch; None if it has none."""
    for number in np.flatnonzero(rounds):
        yield None if logprobs is None else tuple(column[number, place] for column in logprobs)


def describe(
    tokens: Sequence[int],
    rows: Sequence[TokenLogprobs],
    count: int,
    detokenizer: Detokenizer | None,
    beginning: int = 0,
) -> list[dict[int, Logprob]]:
    """Log-probabilities of each token and of the ``count`` likeliest tokens at its position, by token.

    The token itself is always included, and first. ``rows`` come from the device. The first ``beginning``
    tokens are at the beginning of a text.
    """

    def text_of(token: int, place: int) -> str | None:
        return None if detokenizer is None else detokenizer.token_text(token, begins=place < beginning)

    described = []
    for place, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        entry = {token: Logprob(row.chosen, row.rank, text_of(token, place))}
        best = zip(row.tokens[:count], row.likeliest[:count], strict=True)
        for rank, (candidate, value) in enumerate(best, start=1):
            entry[candidate] = Logprob(value, rank, text_of(candidate, place))
        described.append(entry)
    return described
