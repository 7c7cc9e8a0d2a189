"""Optional parts of rounds: adjusted logits and log-probabilities; and log-probabilities of prompts."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.logprobs import Logprobs
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.scoring import score_prompt
from jetspec_jax.decode.state import DecodeState
from jetspec_jax.engine.programs import Kind
from jetspec_jax.engine.records import Admission, Batch
from jetspec_jax.models import Weights
from jetspec_jax.sampling.adjust import Adjustments

#: Most rounds of a dispatch with log-probabilities: its records are large, and fetched whole.
LOGPROBS_ROUNDS = 32


def decoder_for(decoder: TreeDecoder, kind: Kind) -> TreeDecoder:
    """The decoder with the optional parts of rounds of a kind."""
    most = min(decoder.max_rounds, LOGPROBS_ROUNDS) if kind.logprobs else decoder.max_rounds
    return replace(decoder, adjusts=kind.adjusts, logprobs=kind.logprobs, max_rounds=most)


def set_adjustments(decoder: TreeDecoder, state: DecodeState, admission: Admission) -> DecodeState:
    """The state with the logit adjustments of an admitted request. ``state`` is donated."""
    adjusting = admission.adjusting
    if adjusting is None:
        return state
    assert state.adjust is not None, "the engine has allocated adjustments"
    _, words, longest = state.adjust.words.shape
    adjustments = Adjustments.of(
        admission.params,
        vocab_size=decoder.target.vocab_size,
        prompt=adjusting.prompt.tolist(),
        output=adjusting.output,
        endings=adjusting.endings,
        bad_words=adjusting.bad_words,
        words=(words, longest),
    )
    return decoder.adjust(state, np.int32(admission.slot), adjustments)


class PromptScores:
    """Log-probabilities of prompts' tokens but the first."""

    def __init__(self, models: Models, weights: Weights, dtype: jnp.dtype):
        """Keeps the target's models and parameters, and the dtype of its stores."""
        self._arguments = models, weights, dtype
        # The last prompt: its completions share the log-probabilities.
        self._last: tuple[bytes, list[Logprobs]] = (b"", [])

    def launch(self, batch: Batch) -> list[tuple[int, list[Logprobs]]]:
        """Log-probabilities of a batch's admissions that want them, by slot: in parts, and on the device."""
        scored = ((admission.slot, admission.scored) for admission in batch.admissions)
        return [(slot, self._score(prompt)) for slot, prompt in scored if prompt is not None]

    def _score(self, prompt: np.ndarray) -> list[Logprobs]:
        if self._last[0] != prompt.tobytes():
            models, weights, dtype = self._arguments
            self._last = prompt.tobytes(), score_prompt(models, weights, prompt, dtype)
        return self._last[1]


def concatenated(parts: list[Logprobs]) -> Logprobs:
    """Log-probabilities of a prompt, on the host, in one row of tokens."""
    return jax.tree.map(lambda *rows: np.concatenate([row[0] for row in rows]), *parts)
