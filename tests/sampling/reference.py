"""What a request's logits must be after a prefix, in NumPy: made from scratch, of the tokens alone."""

import numpy as np


def adjusted(row, params, prompt, output, *, endings=(), bad_words=()):
    """The logits of the token after prompt and output, as vLLM's sampler has them before the temperature."""
    row = np.array(row, np.float32)
    allowed = range(len(row)) if params.allowed_token_ids is None else params.allowed_token_ids
    forbidden = set(range(len(row))) - set(allowed)
    for word in bad_words:
        *rest, last = word
        if not rest or list(output)[-len(rest) :] == rest:
            forbidden.add(last)
    if len(output) < params.min_tokens:
        forbidden |= set(endings)
    for token, bias in params.logit_bias:
        row[token] += np.float32(bias)
    for token in {*prompt, *output}:
        repetition = np.float32(params.repetition_penalty)
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= np.float32(params.frequency_penalty) * np.float32(list(output).count(token))
        row[token] -= np.float32(params.presence_penalty)
    row[list(forbidden)] = -np.inf
    return row


def path_of(tokens, parents, node):
    path = []
    while node > 0:
        path.append(int(tokens[node]))
        node = parents[node]
    return path[::-1]


def log_softmax(rows):
    """Log-probabilities of rows of logits, in float64."""
    rows = np.asarray(rows, np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))
