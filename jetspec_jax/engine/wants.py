"""What requests want beside their tokens, on the device: adjusted logits, and log-probabilities."""

import itertools
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.logprobs import Logprobs
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.scoring import compile_scoring, score_prompt
from jetspec_jax.decode.state import DecodeState
from jetspec_jax.engine.records import Admission, Batch
from jetspec_jax.models import Weights
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.sampling.params import SamplingParams

#: Most rounds of a dispatch that tells log-probabilities: its records are fetched whole, and are large.
TELLING_ROUNDS = 32


def decoder_for(decoder: TreeDecoder, *, adjusts: bool, logprobs: bool) -> TreeDecoder:
    """The decoder whose rounds also adjust logits, or tell log-probabilities; else it is the same."""
    if not (adjusts or logprobs):
        return decoder
    most = min(decoder.max_rounds, TELLING_ROUNDS) if logprobs else decoder.max_rounds
    return replace(decoder, adjusts=adjusts, logprobs=logprobs, max_rounds=most)


class Kind(NamedTuple):
    """What rounds do beside choosing tokens: each kind has programs of its own.

    Attributes:
        adjusts: They change logits.
        logprobs: They tell log-probabilities.
        masked: The host says in each what may follow.
    """

    adjusts: bool = False
    logprobs: bool = False
    masked: bool = False

    def __str__(self) -> str:
        """Its name in words."""
        wanted = [name for name in ("adjusts", "logprobs") if getattr(self, name)]
        return " ".join([*(["masked"] if self.masked else []), "rounds", *wanted])

    @property
    def parts(self) -> "list[Kind]":
        """All kinds that do no more, this one included: its requests run beside others, and wait at times."""
        return [Kind(*own) for own in itertools.product(*(sorted({False, does}) for does in self))]

    @classmethod
    def of(cls, params: SamplingParams) -> "Kind":
        """That of a request alone."""
        return cls(params.adjusts, params.logprobs is not None, params.structured_outputs is not None)


def adjusted(decoder: TreeDecoder, state: DecodeState, own: Admission) -> DecodeState:
    """The state in which a slot's new request has what it wants of the logits. ``state`` is donated."""
    wanted = own.adjusting
    if wanted is None:
        return state
    assert state.adjust is not None, "the engine has made room for what this request wants"
    _, words, longest = state.adjust.words.shape
    adjustments = Adjustments.of(
        own.params,
        vocab_size=decoder.target.vocab_size,
        prompt=wanted.prompt.tolist(),
        output=wanted.output,
        endings=wanted.endings,
        bad_words=wanted.bad_words,
        words=(words, longest),
    )
    return decoder.adjust(state, np.int32(own.slot), adjustments)


class PromptScores:
    """What is told of prompts: of each token but the first."""

    def __init__(self, models: Models, weights: Weights, dtype: jnp.dtype):
        """Takes the target alone, its parameters, and the type of its stores."""
        self._own = models, weights, dtype
        # The last prompt: the completions of one share what is told of it.
        self._last: tuple[bytes, list[Logprobs]] = (b"", [])

    def launch(self, batch: Batch) -> list[tuple[int, list[Logprobs]]]:
        """Of the admissions of a batch that want it, by slot: in parts, and on the device."""
        return [(own.slot, self._of(own.scored)) for own in batch.admissions if own.scored is not None]

    def compile(self, length: int) -> None:
        """Compiles what it needs for prompts of up to so many tokens."""
        models, weights, dtype = self._own
        compile_scoring(models, weights, length, dtype)

    def _of(self, prompt: np.ndarray) -> list[Logprobs]:
        if self._last[0] != prompt.tobytes():
            models, weights, dtype = self._own
            self._last = prompt.tobytes(), score_prompt(models, weights, prompt, dtype)
        return self._last[1]


def joined(parts: list[Logprobs]) -> Logprobs:
    """What was told of a prompt, on the host, as of one row of tokens."""
    return jax.tree.map(lambda *rows: np.concatenate([row[0] for row in rows]), *parts)
