"""Grammars of requests, for the tokens of their target."""

import threading
from collections.abc import Collection
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Int

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.engine.records import Batch
from jetspec_jax.sampling.grammar import Matcher, Vocabulary
from jetspec_jax.sampling.params import SamplingParams

# One for each target that has met a grammar, as it takes a moment to make; gone with the target.
_VOCABULARIES: WeakKeyDictionary[Target, Vocabulary] = WeakKeyDictionary()
_LOCK = threading.Lock()


def matcher_for(target: Target, params: SamplingParams, stop_ids: Collection[int]) -> Matcher | None:
    """What follows a request through its grammar; None if it has none.

    Args:
        target: The target.
        params: The request's parameters.
        stop_ids: Tokens that end it.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: The grammar cannot be followed with this target: see `Vocabulary.matcher`.
    """
    wanted = params.structured_outputs
    return None if wanted is None else vocabulary_of(target).matcher(wanted, stop_ids)


def vocabulary_of(target: Target) -> Vocabulary:
    """The target's tokens as grammars see them, made by the first call; raises what `Vocabulary` raises."""
    with _LOCK:
        known = _VOCABULARIES.get(target)
        if known is None:
            known = Vocabulary(target.tokenizer, target.config.vocab_size, target.eos_token_ids)
            _VOCABULARIES[target] = known
    return known


class FollowedMatchers:
    """Grammars of requests of the first process, taken along by one that follows it.

    Both make the same masks from the same trees, so that no masks need be sent.
    """

    def __init__(self, target: Target):
        """No slot has one."""
        self._target = target
        # By slot, and how many tokens its request has got.
        self._matchers: dict[int, tuple[Matcher, int]] = {}

    def begin(self, batch: Batch) -> dict[int, Matcher]:
        """Takes note of a batch that comes; the grammars of its rounds, by slot."""
        for slot in batch.releases:
            self._matchers.pop(slot, None)
        for own in batch.admissions:
            self._matchers.pop(own.slot, None)
            matcher = matcher_for(self._target, own.params, own.stop_ids)
            if matcher is not None:
                matcher.advance(own.output)
                self._matchers[own.slot] = matcher, len(own.output)
        return {slot: self._matchers[slot][0] for slot in batch.masked}

    def end(self, batch: Batch, tokens: Int[np.ndarray, "R L D1"]) -> None:
        """Takes what the batch committed, of which a matcher may know the first rounds."""
        for slot in batch.masked:
            matcher, had = self._matchers[slot]
            rows = tokens[:, batch.live.index(slot)]
            committed = rows[rows >= 0].tolist()
            matcher.advance(committed[matcher.count - had :])
            self._matchers[slot] = matcher, had + len(committed)
