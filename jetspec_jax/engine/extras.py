"""What an engine's requests may want beyond tokens that are chosen from the filtered logits as they are."""

from collections.abc import Iterable
from dataclasses import dataclass

from jetspec_jax.engine.request import Request
from jetspec_jax.sampling.adjust import room_for

#: Room that is made where rounds are compiled ahead, so that most bad words compile nothing later: for 16 of
#: them, each at the beginning of a text and behind a space, of up to 8 tokens.
USUAL_BAD_WORDS = (32, 8)


@dataclass(frozen=True)
class Extras:
    """What an engine has memory for. A batch that wants nothing of it runs programs that know nothing of it.

    Attributes:
        adjusts: Masks, biases and penalties.
        bad_words: Room for the bad words of a request: see `jetspec_jax.sampling.adjust.room_for`.
        logprobs: Log-probabilities of what is generated.
        prompt_logprobs: Those of prompts.
    """

    adjusts: bool = False
    bad_words: tuple[int, int] = (0, 0)
    logprobs: bool = False
    prompt_logprobs: bool = False

    @classmethod
    def of(cls, requests: Iterable[Request]) -> "Extras":
        """Those of some requests together."""
        found = cls()
        for request in requests:
            params = request.params
            tells = params.logprobs is not None, params.prompt_logprobs is not None
            found |= cls(params.adjusts, room_for(request.bad_words), *tells)
        return found

    def __or__(self, other: "Extras") -> "Extras":
        """All that one of both has."""
        (words, longest), (more, longer) = self.bad_words, other.bad_words
        return Extras(
            self.adjusts or other.adjusts,
            (max(words, more), max(longest, longer)),
            self.logprobs or other.logprobs,
            self.prompt_logprobs or other.prompt_logprobs,
        )


NO_EXTRAS = Extras()
