"""Grammar matchers of requests, for the tokens of their target."""

import threading
from collections.abc import Collection
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.engine.records import Batch
from jetspec_jax.sampling.grammar import Matcher, Vocabulary
from jetspec_jax.sampling.params import SamplingParams

# Vocabularies by target, because they take a moment to make; freed with the target.
_VOCABULARIES: WeakKeyDictionary[Target, Vocabulary] = WeakKeyDictionary()
_LOCK = threading.Lock()


def matcher_for(target: Target, params: SamplingParams, stop_ids: Collection[int]) -> Matcher | None:
    """A request's grammar matcher; None without a grammar.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: The grammar does not work with this target: see `Vocabulary.matcher`.
    """
    wanted = params.structured_outputs
    return None if wanted is None else vocabulary_of(target).matcher(wanted, stop_ids)


def vocabulary_of(target: Target) -> Vocabulary:
    """The target's tokens as llguidance reads them, cached; raises the errors of `Vocabulary`."""
    with _LOCK:
        known = _VOCABULARIES.get(target)
        if known is None:
            known = Vocabulary(target.tokenizer, target.config.vocab_size, target.eos_token_ids)
            _VOCABULARIES[target] = known
    return known


class WorkerMatchers:
    """Matchers of process 0's requests in a worker.

    Both processes make the same masks from the same trees, so no masks are sent.
    """

    def __init__(self, target: Target):
        self._target = target
        # By slot: the matcher, and the number of tokens that its request has.
        self._matchers: dict[int, tuple[Matcher, int]] = {}

    def begin(self, batch: Batch) -> dict[int, Matcher]:
        """Updates the slots for a batch; returns the matchers of its rounds, by slot."""
        for slot in batch.releases:
            self._matchers.pop(slot, None)
        for admission in batch.admissions:
            self._matchers.pop(admission.slot, None)
            matcher = matcher_for(self._target, admission.params, admission.stop_ids)
            if matcher is not None:
                matcher.advance(admission.output)
                self._matchers[admission.slot] = matcher, len(admission.output)
        return {slot: self._matchers[slot][0] for slot in batch.masked}

    def end(self, batch: Batch, tokens: Int[np.ndarray, "R L D1"]) -> None:
        """Advances the matchers over the batch's tokens; a matcher may already have seen the first rounds."""
        for slot in batch.masked:
            matcher, had = self._matchers[slot]
            rows = tokens[:, batch.live.index(slot)]
            committed = rows[rows >= 0].tolist()
            matcher.advance(committed[matcher.count - had :])
            self._matchers[slot] = matcher, had + len(committed)
