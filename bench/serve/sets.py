"""Sets of conversations: one turn or several, with or without shared prefixes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.common.prompts import load_prompts
from bench.load.arrivals import Lengths
from jetspec_jax.demo import DEMO

#: The path of requests by their form.
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
#: Conversations per shared prefix, and turns per conversation.
ALIKE, TURNS = 8, 4
#: Later turns have a quarter of the words of the first.
LATER = 4
_WORDS = (  # a single token each in most tokenizers
    *("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school", "state", "group"),
    *("country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "work"),
    *("number", "night", "point", "home", "water", "room", "area", "money", "story", "fact", "month", "lot"),
    *("right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house"),
)
_MOST_WORDS = 2**14


@dataclass(frozen=True)
class Conversation:
    """A client's turns, each sent after the answer to the one before, and the most tokens of each answer."""

    turns: tuple[str, ...]
    max_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Asking:
    """The form of requests.

    Attributes:
        model: The model's name; None leaves the field out, which some servers refuse.
        endpoint: "completions" sends the conversation so far as one text, "chat" as messages.
        temperature: The temperature; conversation i has seed i.
        ignore_eos: Whether answers end only at their length; OpenAI's API lacks this field.
    """

    model: str | None = None
    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        """The path of requests."""
        return ENDPOINTS[self.endpoint]

    def body(self, messages: list[str], max_tokens: int, seed: int) -> dict[str, Any]:
        """A request's body.

        Args:
            messages: The turns and answers so far, alternating; the last is the client's.
            max_tokens: The most tokens of the answer.
            seed: The seed of the sampling.
        """
        body: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.model is not None:
            body["model"] = self.model
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.endpoint == "chat":
            roles = "user", "assistant"
            body["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
        else:
            body["prompt"] = "".join(messages)
        return body


def conversations(
    name: str, count: int, prompts: Lengths, outputs: Lengths, shared: int, rng: np.random.Generator
) -> list[Conversation]:
    """Draws conversations of a set.

    Args:
        name: One of `SETS`.
        count: The number of conversations; "demo" has a limited number.
        prompts: Words per turn, each about one token.
        outputs: Tokens per answer.
        shared: Words of the prefixes of "shared".
        rng: Draws lengths and words.
    """
    made = SETS[name](count, prompts, shared, rng)
    return [Conversation(turns, tuple(outputs.draw(len(turns), rng, 2**14))) for turns in made]


def _words(count: int, rng: np.random.Generator) -> str:
    return "".join(f" {_WORDS[place]}" for place in rng.integers(0, len(_WORDS), count))


def _random(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    return [(_words(length, rng),) for length in prompts.draw(count, rng, _MOST_WORDS)]


def _shared(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    prefixes = [_words(shared, rng) for _ in range(-(-count // ALIKE))]
    tails = _random(count, prompts, shared, rng)
    return [(prefixes[number % len(prefixes)] + tail,) for number, (tail,) in enumerate(tails)]


def _turns(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    return [
        (_words(first, rng), *(_words(-(-length // LATER), rng) for length in later))
        for first, *later in (prompts.draw(TURNS, rng, _MOST_WORDS) for _ in range(count))
    ]


def _demo(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    values = [prompt.entry.value for prompt in load_prompts(DEMO)[:count]]
    return [(value if isinstance(value, str) else value[-1]["content"],) for value in values]


#: Random prompts; prompts with shared prefixes; conversations with several turns; the demo's prompts.
SETS: dict[str, Callable[..., list[tuple[str, ...]]]] = {
    "random": _random,
    "shared": _shared,
    "turns": _turns,
    "demo": _demo,
}
