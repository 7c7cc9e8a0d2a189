"""Fine-tuning of a target against its own loops: unlikelihood of what it repeats in greedy text.

A small model that has learnt to copy falls into loops when it always takes the likeliest token. Each round
lets it write, marks the tokens that complete an n-gram which stood in the same text before, and lowers their
probability while plain training on the corpus goes on; it ends when the model repeats itself no more than
the corpus does. Source of the objective: Welleck et al., "Neural Text Generation with Unlikelihood Training"
(arXiv 1908.04319), at the level of sequences.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt16

from jetspec_jax.checkpoint import Target, resolve_dtype
from jetspec_jax.config import ModelConfig
from jetspec_jax.models import Weights
from train.recipes import Polish, Recipe
from train.regenerate import Writer
from train.stages import Deadline
from train.target import cast, token_losses, validator
from train.tokens import Stream, draw_windows
from train.trainer import Loss, Metrics, train

VALIDATION_DRAWS = 4


class PolishData(NamedTuple):
    """What a step draws from.

    Attributes:
        stream: The corpus.
        tokens: Texts that the target wrote.
        repeats: Which of their tokens complete an n-gram that stood there before.
    """

    stream: UInt16[Array, "S"]
    tokens: UInt16[Array, "N T"]
    repeats: Bool[Array, "N T"]


def repeated(
    tokens: Int[np.ndarray, "N T"] | UInt16[np.ndarray, "N T"],
    first: Int[np.ndarray, "N"],
    n: int,
    times: int,
) -> Bool[np.ndarray, "N T"]:
    """Marks the tokens from ``first`` on that complete an n-gram seen ``times`` before in their row.

    People's code repeats itself too; it is the third time and later that makes a loop. For n = 2, first = 1
    and times = 1::

        a b c a b d
        . . . . x .
    """
    marks = np.zeros(tokens.shape, bool)
    for row, text in enumerate(tokens.tolist()):
        seen = Counter()
        for end in range(n, len(text) + 1):
            gram = tuple(text[end - n : end])
            marks[row, end - 1] = seen[gram] >= times and end > first[row]
            seen[gram] += 1
    return marks


def polish(
    folder: Path,
    recipe: Recipe,
    config: ModelConfig,
    weights: Weights,
    streams: tuple[Stream, Stream],
    newline_ids: Int[np.ndarray, "n"],
    deadline: Deadline,
) -> Weights:
    """Fine-tunes float32 weights until the greedy text repeats itself no more than the corpus, or rounds end.

    Raises:
        OutOfTime: The deadline passed; calling again goes on.
    """
    settings, fit, dtype = recipe.polish, recipe.polish.fit, resolve_dtype("auto")
    stream, validation = streams
    usual = corpus_rate(validation, settings)
    loss = polish_loss(config, recipe, dtype)
    keys = jax.random.split(jax.random.key(recipe.seed + 2), VALIDATION_DRAWS)

    validate = validator(loss, keys, dtype)
    writer = Writer(stream, newline_ids, settings.prompt, settings.length, settings.slots)
    for number in range(settings.rounds + 1):
        target = Target(config, cast(cast(weights, jnp.dtype(jnp.bfloat16)), dtype))
        path = folder / f"round-{number}.npz"
        text = writer.write(path, target, settings.sequences, (0.0,), [recipe.seed, 3, number], deadline)
        marks = repeated(text.tokens, text.first, settings.ngram, settings.times)
        rate = float(marks.sum() / np.sum(settings.length - text.first))
        print(
            f"  round {number}: {rate:.1%} of the greedy tokens repeat, {usual:.1%} of the corpus's",
            flush=True,
        )
        if rate <= usual or number == settings.rounds:
            break
        kept = len(text.tokens) // 8
        data, held = (
            PolishData(jnp.asarray(source), jnp.asarray(text.tokens[part]), jnp.asarray(marks[part]))
            for source, part in ((stream, slice(kept, None)), (validation, slice(kept)))
        )
        weights = train(
            folder / f"round-{number}",
            fit,
            loss,
            weights,
            data,
            validate=lambda weights, held=held: validate(weights, held),
            seed=recipe.seed + 3 + number,
            deadline=deadline,
            label=f"polish {number}",
        )
    return weights


def polish_loss(config: ModelConfig, recipe: Recipe, dtype: jnp.dtype) -> Loss:
    """Likelihood of the corpus plus unlikelihood, ``-log(1 - p)``, of the marked tokens."""
    settings, fit = recipe.polish, recipe.polish.fit

    def loss(weights: Weights, data: PolishData, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        window_key, row_key = jax.random.split(key)
        weights = cast(weights, dtype)
        windows = draw_windows(window_key, data.stream, recipe.target_fit.batch, recipe.target_fit.window + 1)
        likelihood = jnp.mean(token_losses(config, weights, windows))
        rows = jax.random.randint(row_key, (fit.batch,), 0, data.tokens.shape[0])
        nats = token_losses(config, weights, data.tokens[rows].astype(jnp.int32))
        # 1 - p is 0 in float32 for the surest tokens: the floor keeps the logarithm finite.
        unlikely = -jnp.log(jnp.maximum(-jnp.expm1(-nats), 1e-7))
        marks = data.repeats[rows][:, 1:]
        penalty = jnp.sum(jnp.where(marks, unlikely, 0.0)) / jnp.maximum(jnp.sum(marks), 1)
        value = likelihood + settings.weight * penalty
        return value, {"likelihood": likelihood, "unlikelihood": penalty}

    return loss


def corpus_rate(stream: Stream, settings: Polish) -> float:
    """Share of repeats among the corpus's own tokens, in rows as long as the target's texts."""
    count = len(stream) // settings.length
    rows = np.asarray(stream[: count * settings.length]).reshape(count, settings.length)
    # A text's prompt is context only; the middle of the prompts' range stands for it.
    first = np.full(count, sum(settings.prompt) // 2)
    return float(repeated(rows, first, settings.ngram, settings.times)[:, first[0] :].mean())
