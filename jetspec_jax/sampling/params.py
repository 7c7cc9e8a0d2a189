"""How a request is sampled and when it stops, checked; imports no JAX."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jetspec_jax.arguments import check_flag, check_integer, check_number, check_text, check_type, shown
from jetspec_jax.sampling.structured import StructuredOutputsParams

#: Between these a float32 logit divided by the temperature is finite, and 0 only if it was.
COLDEST, HOTTEST = 1e-30, 1e30
#: Most completions of one prompt.
MOST_COMPLETIONS = 16384


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens (ties with the k-th are kept); None, 0 and -1 keep all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; None keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest; None keeps all.
        seed: Seed of the request's noise; without one, a seed is drawn once.
        max_tokens: Most tokens to generate; None goes on to the context's end.
        stop: Strings that end the text; the first one found is cut off, with all that follows. Special tokens
            are no text: they belong in ``stop_token_ids``.
        stop_token_ids: Tokens that end the sequence; the one found is kept in the token ids.
        ignore_eos: Do not stop at the target's end-of-sequence tokens.
        n: Completions of the prompt. The first has the seed, each other one a seed made of it and its index.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, in the text.
        skip_special_tokens: Leave special tokens out of the text.
        structured_outputs: A form that the text must have; None is any.

    Raises:
        TypeError: A setting is of a wrong type.
        ValueError: A setting is out of its range, or two contradict each other.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = 256
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    n: int = 1
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        """Checks every setting, and brings it into one form."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        top_k = _or_none("top_k", self.top_k, check_integer, -1)
        checked = {
            "temperature": _temperature(self.temperature),
            "top_k": None if top_k in (-1, 0) else top_k,
            "top_p": _or_none("top_p", self.top_p, _share, None),
            "min_p": _or_none("min_p", self.min_p, _share, 0.0),
            "seed": _or_none("seed", self.seed, check_integer, 0, 2**64 - 1),
            "max_tokens": _or_none("max_tokens", self.max_tokens, check_integer, 1),
            "stop": tuple(_stop_string(text) for text in _as_list("stop", stop, "strings")),
            "stop_token_ids": tuple(
                check_integer("a token id in stop_token_ids", token, 0)
                for token in _as_list("stop_token_ids", self.stop_token_ids, "token ids")
            ),
            "n": check_integer("n", self.n, 1, MOST_COMPLETIONS),
        }
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        checked |= {name: check_flag(name, getattr(self, name)) for name in flags}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.structured_outputs is not None:
            kind = "StructuredOutputsParams or None"
            check_type("structured_outputs", self.structured_outputs, StructuredOutputsParams, kind)
            if self.ignore_eos:
                raise ValueError(
                    "structured_outputs and ignore_eos contradict: a form that is complete ends the text"
                )

    def each(self) -> "Sequence[SamplingParams]":
        """The parameters of each of the ``n`` completions, which has a seed of its own."""
        if self.n == 1:
            return [self]
        seed = draw_seed() if self.seed is None else self.seed
        return [replace(self, n=1, seed=_folded(seed, index)) for index in range(self.n)]


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbits(64)


def _folded(seed: int, index: int) -> int:
    """The seed of a prompt's completion."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0])


def _or_none(name: str, value: Any, check: Callable[..., Any], *bounds: float | None) -> Any:
    """A setting that may be left open."""
    return None if value is None else check(name, value, *bounds)


def _temperature(value: Any) -> float:
    temperature = check_number("temperature", value)
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
        raise ValueError(f"temperature must be 0 or lie in [{COLDEST}, {HOTTEST}], not {shown(value)}")
    return temperature


def _share(name: str, value: Any, least: float | None) -> float:
    """A number in [least, 1], or without a least one in (0, 1]."""
    share = check_number(name, value)
    if not (0 < share <= 1 or share == least):
        bounds = "(0, 1]" if least is None else f"[{least:g}, 1]"
        raise ValueError(f"{name} must lie in {bounds}, or be None, not {shown(value)}")
    return share


def _stop_string(text: Any) -> str:
    check_type("a string in stop", text, str, "a string")
    if not text:
        raise ValueError("stop must hold strings that are not empty, not ''")
    check_text(f"the stop string {shown(text)}", text)
    return text


def _as_list(name: str, values: Any, of: str) -> Sequence[Any]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of {of}, not {shown(values)}")
    return values
