"""Fine-tuning of a target against its own repetition: unlikelihood of what it repeats in greedy text.

A small model that has learnt to copy falls into loops in greedy decoding. Each round generates text, marks
the tokens that complete an n-gram which occurred before in the same text, and lowers their probability while
plain training on the corpus continues. Rounds end when the model repeats itself no more than the corpus does.
Source of the objective: Welleck et al., "Neural Text Generation with Unlikelihood Training" (arXiv
1908.04319), at the level of sequences.
"""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Key, UInt16

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.config import ModelConfig
from jetspec_jax.models import Weights
from train.demo.continuations import continue_corpus, cut_corpus, read_rows
from train.demo.recipes import PairRecipe, Polish
from train.demo.target import token_losses
from train.demo.tokens import Stream, draw_windows
from train.loop.stages import Deadline
from train.loop.trainer import DrawnOnDevice, Evaluated, mean_of, train
from train.loss.objectives import Loss, Mean, Means
from train.loss.precision import as_shipped, cast

VALIDATION_DRAWS = 4


class PolishData(NamedTuple):
    """The data that a step draws from.

    Attributes:
        stream: The corpus.
        tokens: Texts that the target generated.
        repeats: Which of their tokens complete an n-gram that occurred before.
    """

    stream: UInt16[Array, "S"]
    tokens: Int32[Array, "N T"]
    repeats: Bool[Array, "N T"]


def repeated(
    tokens: Int[np.ndarray, "N T"] | UInt16[np.ndarray, "N T"],
    first: Int[np.ndarray, "N"],
    n: int,
    times: int,
) -> Bool[np.ndarray, "N T"]:
    """Marks the tokens from ``first`` on that complete an n-gram seen ``times`` before in their row.

    For n = 2, first = 1 and times = 1::

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
    recipe: PairRecipe,
    config: ModelConfig,
    weights: Weights,
    streams: tuple[Stream, Stream],
    newline_ids: Int[np.ndarray, "n"],
    deadline: Deadline,
) -> Weights:
    """Fine-tunes float32 weights until the greedy text repeats itself no more than the corpus, or rounds end.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
    """
    settings, fit, dtype = recipe.polish, recipe.polish.fit, resolve_dtype("auto")
    stream, validation = streams
    usual = corpus_rate(validation, settings)
    loss = polish_loss(config, recipe, dtype)
    keys = jax.random.split(jax.random.key(recipe.seed + 2), VALIDATION_DRAWS)

    @jax.jit
    def validate(weights: Weights, frozen: PolishData, batch: Any, key: Key[Array, ""]) -> Means:
        return loss(as_shipped(weights, dtype), frozen, batch, key)

    for number in range(settings.rounds + 1):
        target = Target(config, as_shipped(weights, dtype))
        seed = (recipe.seed, 3, number)
        continue_corpus(
            folder / f"text-{number}",
            target,
            cut_corpus(
                stream,
                newline_ids,
                count=settings.sequences,
                prompt=settings.prompt,
                temperatures=(0.0,),
                seed=seed,
            ).prompts(settings.length),
            name=f"{recipe.name}, before round {number}",
            seed=seed,
            held=(),
            shard_documents=settings.sequences,
            slots=settings.slots,
            deadline=deadline,
        )
        tokens, learn = read_rows(folder / f"text-{number}")
        first = np.argmax(learn, axis=1)
        marks = repeated(tokens, first, settings.ngram, settings.times)
        rate = float(marks.sum() / np.sum(settings.length - first))
        print(
            f"  round {number}: {rate:.1%} of the greedy tokens repeat, {usual:.1%} of the corpus's",
            flush=True,
        )
        if rate <= usual or number == settings.rounds:
            break
        kept = len(tokens) // 8
        data, held = (
            PolishData(jnp.asarray(source), jnp.asarray(tokens[part]), jnp.asarray(marks[part]))
            for source, part in ((stream, slice(kept, None)), (validation, slice(kept)))
        )
        trained = train(
            folder / f"round-{number}",
            fit,
            loss,
            weights,
            frozen=data,
            batches=DrawnOnDevice(),
            evaluate=partial(_evaluate, validate, held, keys),
            seed=recipe.seed + 3 + number,
            deadline=deadline,
            label=f"polish {number}",
        )
        weights = trained.weights
    return weights


def polish_loss(config: ModelConfig, recipe: PairRecipe, dtype: jnp.dtype) -> Loss:
    """Likelihood of the corpus plus unlikelihood, ``-log(1 - p)``, of the marked tokens."""
    settings, fit = recipe.polish, recipe.polish.fit

    def loss(weights: Weights, frozen: PolishData, batch: Any, key: Key[Array, ""]) -> Means:
        window_key, row_key = jax.random.split(key)
        weights = cast(weights, dtype)
        windows = draw_windows(window_key, frozen.stream, recipe.target_fit.batch, recipe.target_window + 1)
        likelihood = jnp.mean(token_losses(config, weights, windows))
        rows = jax.random.randint(row_key, (fit.batch,), 0, frozen.tokens.shape[0])
        nats = token_losses(config, weights, frozen.tokens[rows])
        # 1 - p may round to 0 in float32; the floor keeps the logarithm finite.
        unlikely = -jnp.log(jnp.maximum(-jnp.expm1(-nats), 1e-7))
        marks = frozen.repeats[rows][:, 1:]
        penalty = jnp.sum(jnp.where(marks, unlikely, 0.0)) / jnp.maximum(jnp.sum(marks), 1)
        means = {
            "loss": likelihood + settings.weight * penalty,
            "likelihood": likelihood,
            "unlikelihood": penalty,
        }
        return {name: Mean(value, jnp.float32(1)) for name, value in means.items()}

    return loss


def _evaluate(loss: Loss, held: PolishData, keys: Key[Array, "n"], weights: Weights) -> Evaluated:
    """Means over fixed draws from held-out text."""
    means = mean_of(loss, weights, held, (({}, key) for key in keys))
    return Evaluated({f"validation_{name}": value for name, value in means.items()}, -means["loss"])


def corpus_rate(stream: Stream, settings: Polish) -> float:
    """Share of repeats among the corpus's own tokens, in rows as long as the target's texts."""
    count = len(stream) // settings.length
    rows = np.asarray(stream[: count * settings.length]).reshape(count, settings.length)
    # A text's prompt is context only; the middle of the prompts' range stands for it.
    first = np.full(count, sum(settings.prompt) // 2)
    return float(repeated(rows, first, settings.ngram, settings.times)[:, first[0] :].mean())
