"""Optional features of requests that need device memory: adjusted logits and log-probabilities."""

from collections.abc import Iterable
from dataclasses import dataclass

from jetspec_jax.engine.request import Request
from jetspec_jax.sampling.adjust import room_for

#: Room for bad words that warm-up allocates, so that most requests compile nothing later: 16 words, each at
#: the beginning of a text and after a space, of up to 8 tokens.
USUAL_BAD_WORDS = (32, 8)


@dataclass(frozen=True)
class Extras:
    """Features that an engine has memory for. A batch without them runs programs without them.

    Attributes:
        adjusts: Masks, biases and penalties.
        bad_words: Room for a request's bad words: see `jetspec_jax.sampling.adjust.room_for`.
        logprobs: Log-probabilities of generated tokens.
        prompt_logprobs: Log-probabilities of prompts.
    """

    adjusts: bool = False
    bad_words: tuple[int, int] = (0, 0)
    logprobs: bool = False
    prompt_logprobs: bool = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Extras":
        """All features that the requests use."""
        found = cls()
        for request in requests:
            params = request.params
            logprobs = params.logprobs is not None, params.prompt_logprobs is not None
            found |= cls(params.adjusts, room_for(request.bad_words), *logprobs)
        return found

    def __or__(self, other: "Extras") -> "Extras":
        (words, longest), (more, longer) = self.bad_words, other.bad_words
        return Extras(
            self.adjusts or other.adjusts,
            (max(words, more), max(longest, longer)),
            self.logprobs or other.logprobs,
            self.prompt_logprobs or other.prompt_logprobs,
        )


NO_EXTRAS = Extras()
