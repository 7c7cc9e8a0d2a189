"""`RequestOutput`: the completions of a prompt, as `LLM.generate` returns them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from jetspec_jax.engine.output import Completion


@dataclass(frozen=True, eq=False, repr=False)
class RequestOutput:
    """The completions of a prompt, with vLLM's attributes.

    If there is one, it also has all attributes of that `Completion`, such as ``text``, ``token_ids`` and
    ``rounds``; if there are several, these raise an AttributeError.

    Attributes:
        outputs: The ``n`` completions.
        finished: True: all of them are whole.
    """

    outputs: list[Completion]
    finished: ClassVar[bool] = True

    @property
    def request_id(self) -> str:
        """The prompt's number in this process, which its completions share."""
        return self.outputs[0].request_id

    @property
    def prompt(self) -> str | None:
        """The prompt's text; None if it was given as tokens."""
        return self.outputs[0].prompt

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.outputs[0].prompt_token_ids

    @property
    def prompt_logprobs(self) -> Any:
        """See `Completion`."""
        return self.outputs[0].prompt_logprobs

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were in the prefix cache, as the first completion found it."""
        metrics = self.outputs[0].metrics
        return None if metrics is None else metrics.prefix_tokens

    def __getattr__(self, name: str) -> Any:
        outputs = self.__dict__.get("outputs", ())
        if len(outputs) > 1 and hasattr(outputs[0], name):
            raise AttributeError(f"the prompt has {len(outputs)} completions: use outputs[i].{name}")
        if len(outputs) == 1 and not name.startswith("__"):
            return getattr(outputs[0], name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RequestOutput):
            return self.outputs == other.outputs
        return self.outputs == [other] if isinstance(other, Completion) else NotImplemented

    def __repr__(self) -> str:
        return f"RequestOutput({self.outputs!r})"


#: vLLM's name.
CompletionOutput = Completion


def by_prompt(completions: Iterable[Completion]) -> list[RequestOutput]:
    """The output of each prompt, from its completions in a row."""
    groups: list[list[Completion]] = []
    for completion in completions:
        if completion.index == 0:
            groups.append([])
        groups[-1].append(completion)
    return [RequestOutput(group) for group in groups]
