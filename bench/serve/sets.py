"""What clients ask: conversations of one turn or several, some of which begin alike."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.common.prompts import load_prompts
from bench.load.arrivals import Lengths
from jetspec_jax.demo import DEMO

#: Where requests go, by the form that they have.
ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
#: Conversations that share each beginning, and turns of a conversation.
ALIKE, TURNS = 8, 4
#: Later turns have this part of the words of a first.
LATER = 4
_WORDS = (  # most tokenizers have each of them as one token
    *("time", "year", "people", "way", "day", "man", "thing", "life", "world", "school", "state", "group"),
    *("country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "work"),
    *("number", "night", "point", "home", "water", "room", "area", "money", "story", "fact", "month", "lot"),
    *("right", "study", "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house"),
)
_MOST_WORDS = 2**14


@dataclass(frozen=True)
class Conversation:
    """Turns of one client, each of which follows the answer to the one before.

    Attributes:
        turns: What the client says.
        max_tokens: Of each answer.
    """

    turns: tuple[str, ...]
    max_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Asking:
    """How conversations are written as requests.

    Attributes:
        model: Its name; None is whatever the server has, which not all servers take.
        endpoint: "completions" sends all that was said as one text, "chat" as messages.
        temperature: Of all; conversation i has seed i.
        ignore_eos: Whether answers are as long as they may be; a field that OpenAI does not have.
    """

    model: str | None = None
    endpoint: str = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        """Where requests go."""
        return ENDPOINTS[self.endpoint]

    def body(self, said: list[str], max_tokens: int, seed: int) -> dict[str, Any]:
        """A request.

        Args:
            said: Turns and answers in turn, the last one the client's.
            max_tokens: Of the answer.
            seed: Of its draws.
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
            body["messages"] = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
        else:
            body["prompt"] = "".join(said)
        return body


def conversations(
    name: str, count: int, prompts: Lengths, outputs: Lengths, shared: int, rng: np.random.Generator
) -> list[Conversation]:
    """So many conversations of a set.

    Args:
        name: One of `SETS`.
        count: How many; "demo" has no more than there are.
        prompts: Words of a turn, each about a token.
        outputs: Tokens of an answer.
        shared: Words that conversations of "shared" begin with.
        rng: Draws all of them.
    """
    made = SETS[name](count, prompts, shared, rng)
    return [Conversation(turns, tuple(outputs.draw(len(turns), rng, 2**14))) for turns in made]


def _words(count: int, rng: np.random.Generator) -> str:
    return "".join(f" {_WORDS[place]}" for place in rng.integers(0, len(_WORDS), count))


def _random(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    return [(_words(length, rng),) for length in prompts.draw(count, rng, _MOST_WORDS)]


def _shared(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    begins = [_words(shared, rng) for _ in range(-(-count // ALIKE))]
    ends = _random(count, prompts, shared, rng)
    return [(begins[number % len(begins)] + end,) for number, (end,) in enumerate(ends)]


def _turns(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    return [
        (_words(first, rng), *(_words(-(-length // LATER), rng) for length in later))
        for first, *later in (prompts.draw(TURNS, rng, _MOST_WORDS) for _ in range(count))
    ]


def _demo(count: int, prompts: Lengths, shared: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    entries = [prompt.entry.value for prompt in load_prompts(DEMO)[:count]]
    return [(own if isinstance(own, str) else own[-1]["content"],) for own in entries]


#: Sets of conversations: no two alike; some that begin alike; several turns each; the demo's prompts.
SETS: dict[str, Callable[..., list[tuple[str, ...]]]] = {
    "random": _random,
    "shared": _shared,
    "turns": _turns,
    "demo": _demo,
}
