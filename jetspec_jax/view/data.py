"""A traced generation as one JSON object: what ``--json`` prints, and what the page draws."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_jax.engine.output import Completion
from jetspec_jax.inspect.trace import RoundTrace
from jetspec_jax.tree import ROOT_INDEX
from jetspec_jax.view.tokens import pieces, token_label

NO_RANK = -1


def trace_data(
    prompt: Sequence[int],
    rounds: Sequence[RoundTrace],
    completion: Completion,
    tokenizer: Any,
    settings: Mapping[str, Any],
    *,
    digits: int = 6,
) -> dict[str, Any]:
    """A generation and its rounds as JSON values.

    The fields of a round are those of `RoundTrace` without the candidates; ``ranks`` says which candidate of
    its row each node is (0 is the best), and is -1 for the anchor. ``pieces`` is the text of the prompt and
    the output token by token, ``labels`` the text of every token of the trees on one line.

    Args:
        prompt: The prompt's tokens.
        rounds: The rounds, all or some.
        completion: The whole completion.
        tokenizer: A transformers tokenizer, or None.
        settings: What else is to be known of the run.
        digits: Decimals that log-probabilities are rounded to.
    """
    return {
        "settings": dict(settings),
        "prompt_token_ids": [int(token) for token in prompt],
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "accept_lengths": completion.accept_lengths,
        "mean_acceptance_length": completion.mean_acceptance_length,
        "pieces": pieces(tokenizer, [*prompt, *completion.token_ids]),
        "labels": labels_of(rounds, tokenizer),
        "rounds": [round_data(one, digits) for one in rounds],
    }


def labels_of(rounds: Sequence[RoundTrace], tokenizer: Any) -> dict[str, str]:
    """The text of every token of some rounds' trees, on one line, by the token's id."""
    used = {int(token) for one in rounds for token in (*one.tokens, *one.choices)}
    return {str(token): token_label(tokenizer, token) for token in sorted(used)}


def round_data(one: RoundTrace, digits: int) -> dict[str, Any]:
    """A round as JSON values, its log-probabilities with so many decimals."""

    def rounded(values: np.ndarray) -> list[float | None]:
        # JSON has no infinity either: null is a token without probability.
        return [round(value, digits) if math.isfinite(value) else None for value in values.tolist()]

    return {
        "start": one.start,
        "tokens": one.tokens.tolist(),
        "parents": one.parents.tolist(),
        "ranks": _ranks(one),
        "scores": rounded(one.scores),
        "target_log_probs": rounded(one.target_log_probs),
        "choices": one.choices.tolist(),
        "path": one.path.tolist(),
        "committed": one.committed.tolist(),
    }


def _ranks(one: RoundTrace) -> list[int]:
    """Which of its row's candidates each node is."""
    if len(one.tokens) == 1:
        return [NO_RANK]
    same = one.candidate_tokens[one.depths - 1] == one.tokens[:, None]
    ranks = same.argmax(axis=1)
    ranks[ROOT_INDEX] = NO_RANK
    return ranks.tolist()
