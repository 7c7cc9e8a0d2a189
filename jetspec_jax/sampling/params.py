"""How a request is sampled and when it stops, checked; imports no JAX."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jetspec_jax.arguments import (
    check_flag,
    check_integer,
    check_number,
    check_text,
    check_type,
    refusing_unknown,
    shown,
)
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.vllm_names import SAMPLING

#: Between these a float32 logit divided by the temperature is finite, and 0 only if it was.
COLDEST, HOTTEST = 1e-30, 1e30
#: Most completions of one prompt.
MOST_COMPLETIONS = 16384
#: Most alternatives of a token whose log-probabilities are told.
MOST_LOGPROBS = 20
#: Presence and frequency penalties lie between this and its negative, and so do biases.
MOST_PENALTY, MOST_BIAS = 2.0, 100.0


@refusing_unknown(SAMPLING)
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Attributes:
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens (ties with the k-th are kept); None, 0 and -1 keep all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; None keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest; None keeps all.
        seed: Seed of the request's noise, from -2**63 to 2**64 - 1; without one, a seed is drawn once. The
            noise reads its lowest 64 bits, so -1 is the same seed as 2**64 - 1.
        max_tokens: Most tokens to generate; None goes on to the context's end.
        stop: Strings that end the text; the first one found is cut off, with all that follows. Special tokens
            are no text: they belong in ``stop_token_ids``.
        stop_token_ids: Tokens that end the sequence; the one found is kept in the token ids.
        ignore_eos: Do not stop at the target's end-of-sequence tokens.
        n: Completions of the prompt. The first has the seed, each other one a seed made of it and its index.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, in the text.
        skip_special_tokens: Leave special tokens out of the text.
        presence_penalty: Taken once from the logit of each token that the output has; at most 2 either way.
        frequency_penalty: Taken from the logit of each token as often as the output has it; likewise.
        repetition_penalty: Of tokens that the prompt or the output has, positive logits are divided by it,
            and negative ones multiplied.
        min_tokens: Tokens before which neither end-of-sequence nor stop tokens are chosen, and no stop string
            ends the text.
        logit_bias: What is added to the logits of some tokens; at most 100 either way. It becomes pairs.
        bad_words: Words that the output must not have: the last token of one is not chosen after the others.
        allowed_token_ids: The only tokens to choose from; None allows all.
        logprobs: How many of the likeliest tokens are told with each generated one, with log-probabilities of
            the target's own distribution, before all settings; at most 20. None tells none.
        prompt_logprobs: Likewise with each token of the prompt but the first.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = ()
    bad_words: Sequence[str] | None = ()
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
            "seed": _or_none("seed", self.seed, check_integer, -(2**63), 2**64 - 1),
            "max_tokens": _or_none("max_tokens", self.max_tokens, check_integer, 1),
            "stop": _texts("stop", "string", stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "n": check_integer("n", self.n, 1, MOST_COMPLETIONS),
            "presence_penalty": _bounded("presence_penalty", self.presence_penalty, MOST_PENALTY),
            "frequency_penalty": _bounded("frequency_penalty", self.frequency_penalty, MOST_PENALTY),
            "repetition_penalty": _positive("repetition_penalty", self.repetition_penalty),
            "min_tokens": check_integer("min_tokens", self.min_tokens, 0),
            "logit_bias": _biases(self.logit_bias),
            "bad_words": _texts("bad_words", "word", self.bad_words),
            "allowed_token_ids": _or_none("allowed_token_ids", self.allowed_token_ids, _token_ids),
            "logprobs": _or_none("logprobs", self.logprobs, check_integer, 0, MOST_LOGPROBS),
            "prompt_logprobs": _or_none(
                "prompt_logprobs", self.prompt_logprobs, check_integer, 0, MOST_LOGPROBS
            ),
        }
        flags = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        checked |= {name: check_flag(name, getattr(self, name)) for name in flags}
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty, so that no token could be chosen; None allows all")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            least, most = shown(self.min_tokens), shown(self.max_tokens)
            raise ValueError(f"min_tokens must be at most max_tokens, {most}, not {least}")
        if self.structured_outputs is not None:
            kind = "StructuredOutputsParams or None"
            check_type("structured_outputs", self.structured_outputs, StructuredOutputsParams, kind)
            if self.ignore_eos:
                raise ValueError(
                    "structured_outputs and ignore_eos contradict: a form that is complete ends the text"
                )

    @property
    def adjusts(self) -> bool:
        """Whether the target's logits are changed before the temperature divides them."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        masks = self.allowed_token_ids is not None, bool(self.bad_words), self.min_tokens > 0
        return any(penalties) or bool(self.logit_bias) or any(masks)

    @property
    def wants_more(self) -> bool:
        """Whether more is wanted than tokens that are chosen of the filtered logits as they are."""
        told = self.logprobs, self.prompt_logprobs, self.structured_outputs
        return self.adjusts or any(own is not None for own in told)

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
    return int(np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0])


def _or_none(name: str, value: Any, check: Callable[..., Any], *bounds: float | None) -> Any:
    """A setting that may be left open."""
    return None if value is None else check(name, value, *bounds)


def _temperature(value: Any) -> float:
    return 0.0 if check_number("temperature", value) == 0 else _positive("temperature", value, "be 0 or ")


def _positive(name: str, value: Any, otherwise: str = "") -> float:
    """A number that float32 may be divided by and multiplied with."""
    number = check_number(name, value)
    if not COLDEST <= number <= HOTTEST:
        raise ValueError(f"{name} must {otherwise}lie in [{COLDEST}, {HOTTEST}], not {shown(value)}")
    return number


def _bounded(name: str, value: Any, most: float) -> float:
    """A number that is at most so much, either way."""
    number = check_number(name, value)
    if not -most <= number <= most:
        raise ValueError(f"{name} must lie in [{-most:g}, {most:g}], not {shown(value)}")
    return number


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Biases as pairs in the order of their tokens, which is what they may be given as, too."""
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    checked = {}
    for pair in pairs if isinstance(given, Mapping | tuple | None) else [given]:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"logit_bias must be a mapping of token ids to numbers, not {shown(given)}")
        token = check_integer("a token id in logit_bias", pair[0], 0)
        checked[token] = _bounded(f"the bias of token {token} in logit_bias", pair[1], MOST_BIAS)
    return tuple(sorted(checked.items()))


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    checked = _as_list(name, values, "token ids")
    return tuple(check_integer(f"a token id in {name}", token, 0) for token in checked)


def _share(name: str, value: Any, least: float | None) -> float:
    """A number in [least, 1], or without a least one in (0, 1]."""
    share = check_number(name, value)
    if not (0 < share <= 1 or share == least):
        bounds = "(0, 1]" if least is None else f"[{least:g}, 1]"
        raise ValueError(f"{name} must lie in {bounds}, or be None, not {shown(value)}")
    return share


def _texts(name: str, kind: str, values: Any) -> tuple[str, ...]:
    """Strings that are no empty ones; ``kind`` says what they are."""
    checked = _as_list(name, values, f"{kind}s")
    for text in checked:
        check_type(f"a {kind} in {name}", text, str, "a string")
        if not text:
            raise ValueError(f"{name} must hold {kind}s that are not empty, not ''")
        check_text(f"the {kind} {shown(text)} in {name}", text)
    return tuple(checked)


def _as_list(name: str, values: Any, of: str) -> Sequence[Any]:
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of {of}, not {shown(values)}")
    return values
