"""Grammars of requests, for the tokens of their target."""

import threading
from collections.abc import Collection
from weakref import WeakKeyDictionary

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.device.processes import spans
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
        ValueError: The grammar cannot be followed with this target: as `Vocabulary.matcher`, or several
            processes share the target.
    """
    wanted = params.structured_outputs
    if wanted is None:
        return None
    if spans(target.mesh):
        raise ValueError("structured_outputs needs a target that one process holds; this one spans several")
    with _LOCK:
        known = _VOCABULARIES.get(target)
        if known is None:
            known = Vocabulary(target.tokenizer, target.config.vocab_size, target.eos_token_ids)
            _VOCABULARIES[target] = known
    return known.matcher(wanted, stop_ids)
