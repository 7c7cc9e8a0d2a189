"""What an engine's requests may want beyond tokens that are chosen from the filtered logits as they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from jetspec_jax.engine.request import Request
from jetspec_jax.sampling.adjust import room_for


@dataclass(frozen=True)
class Extras:
    """What an engine has arrays and memory for. A batch that wants nothing of it runs programs without it.

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
    def of(cls, requests: Sequence[Request]) -> "Extras":
        """Those of some requests together."""
        rooms = [room_for(request.bad_words) for request in requests]
        params = [request.params for request in requests]
        return cls(
            any(own.adjusts for own in params),
            (max((words for words, _ in rooms), default=0), max((length for _, length in rooms), default=0)),
            any(own.logprobs is not None for own in params),
            any(own.prompt_logprobs is not None for own in params),
        )

    def cover(self, other: "Extras") -> bool:
        """Whether an engine with these has all of others."""
        enough = all(mine >= wanted for mine, wanted in zip(self.bad_words, other.bad_words, strict=True))
        flags = ("adjusts", "logprobs", "prompt_logprobs")
        return enough and all(getattr(self, name) >= getattr(other, name) for name in flags)
