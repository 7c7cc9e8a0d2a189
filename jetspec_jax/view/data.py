"""A traced generation as a JSON object, which ``--json`` prints and the page draws."""

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

    The fields of a round are those of `RoundTrace` without the candidates. ``ranks`` is each node's rank
    among the candidates of its row (0 is the row's best, whatever a selector makes of it below the node's
    parent), and -1 for the anchor. ``pieces`` has the text of each token of the prompt and the output,
    ``labels`` the text of every token of the trees on one line.

    ``digits`` are the decimals of log-probabilities.
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
        "rounds": [round_data(trace, digits) for trace in rounds],
    }


def labels_of(rounds: Sequence[RoundTrace], tokenizer: Any) -> dict[str, str]:
    """The text on one line of every token of the rounds' trees, by the token's id."""
    used = {int(token) for trace in rounds for token in (*trace.tokens, *trace.choices)}
    return {str(token): token_label(tokenizer, token) for token in sorted(used)}


def round_data(trace: RoundTrace, digits: int) -> dict[str, Any]:
    """A round as JSON values, with ``digits`` decimals of log-probabilities."""

    def rounded(values: np.ndarray) -> list[float | None]:
        # JSON has no infinity: null stands for a probability of 0.
        return [round(value, digits) if math.isfinite(value) else None for value in values.tolist()]

    return {
        "start": trace.start,
        "tokens": trace.tokens.tolist(),
        "parents": trace.parents.tolist(),
        "ranks": _ranks(trace),
        "scores": rounded(trace.scores),
        "target_log_probs": rounded(trace.target_log_probs),
        "choices": trace.choices.tolist(),
        "path": trace.path.tolist(),
        "committed": trace.committed.tolist(),
    }


def _ranks(trace: RoundTrace) -> list[int]:
    if len(trace.tokens) == 1:
        return [NO_RANK]
    same = trace.candidate_tokens[trace.depths - 1] == trace.tokens[:, None]
    ranks = same.argmax(axis=1)
    ranks[ROOT_INDEX] = NO_RANK
    return ranks.tolist()
