"""A request's sampling parameters and stop conditions, validated; imports no JAX."""

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

#: Bounds of the temperature, so that a float32 logit divided by it neither overflows nor underflows.
COLDEST, HOTTEST = 1e-30, 1e30
#: Most completions of one prompt.
MOST_COMPLETIONS = 16384
#: Most alternatives of a token that are returned with log-probabilities.
MOST_LOGPROBS = 20
#: Bounds of presence and frequency penalties, and of biases, in both directions.
MOST_PENALTY, MOST_BIAS = 2.0, 100.0


@refusing_unknown(SAMPLING)
@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters and stop conditions of a request.

    Attributes:
        temperature: The softmax temperature; 0 is greedy.
        top_k: Keep the k most likely tokens (ties with the k-th are kept); None, 0 and -1 keep all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches this; None keeps all.
        min_p: Keep tokens at least this times as likely as the likeliest; None keeps all.
        seed: Seed of the request's noise, from -2**63 to 2**64 - 1; None draws a random seed once. Only the
            lowest 64 bits count, so -1 is the same seed as 2**64 - 1.
        max_tokens: Most tokens to generate; None means up to the end of the context.
        stop: Strings that end the text, which is cut before the first of them. Special tokens are not text;
            use ``stop_token_ids`` for them.
        stop_token_ids: Tokens that end the sequence; they are kept in the token ids.
        ignore_eos: Do not stop at the target's end-of-sequence tokens.
        n: Number of completions. The first uses the seed, the others seeds derived from it and their index.
        include_stop_str_in_output: Keep the stop string, or the text of the stop token, in the text.
        skip_special_tokens: Leave special tokens out of the text.
        presence_penalty: Subtracted from the logits of tokens in the output; in [-2, 2].
        frequency_penalty: Subtracted from a token's logit for each occurrence in the output; in [-2, 2].
        repetition_penalty: For tokens in the prompt or output, positive logits are divided by it and negative
            logits multiplied.
        min_tokens: Number of tokens before which no end-of-sequence or stop token is chosen, and no stop
            string ends the text.
        logit_bias: Added to the logits of some tokens; in [-100, 100]. It is stored as pairs.
        bad_words: Words that must not occur in the output: the last token is not chosen after the others.
        allowed_token_ids: The only tokens to choose from; None allows all.
        logprobs: Number of most likely tokens, at most 20, to return with each generated token, with
            log-probabilities of the target's distribution before all settings. None returns none.
        prompt_logprobs: The same for each token of the prompt except the first.
        structured_outputs: A form that the text must have; None allows any text.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range, or two settings contradict each other.
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
        """Whether penalties, biases or masks change the target's logits."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        masks = self.allowed_token_ids is not None, bool(self.bad_words), self.min_tokens > 0
        return any(penalties) or bool(self.logit_bias) or any(masks)

    @property
    def wants_more(self) -> bool:
        """Whether the request needs adjusted logits, log-probabilities or a grammar."""
        extras = self.logprobs, self.prompt_logprobs, self.structured_outputs
        return self.adjusts or any(extra is not None for extra in extras)

    def clone(self) -> "SamplingParams":
        """An equal copy, as vLLM's; `dataclasses.replace` makes one with other values."""
        return replace(self)

    def each(self) -> "Sequence[SamplingParams]":
        """The parameters of each of the ``n`` completions, with separate seeds."""
        if self.n == 1:
            return [self]
        seed = draw_seed() if self.seed is None else self.seed
        return [replace(self, n=1, seed=_folded(seed, index)) for index in range(self.n)]


def draw_seed() -> int:
    """A random seed of 64 bits, for a request without a seed."""
    return secrets.randbits(64)


def _folded(seed: int, index: int) -> int:
    """The seed of completion ``index``."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed % 2**64, index]).generate_state(1, np.uint64)[0])


def _or_none(name: str, value: Any, check: Callable[..., Any], *bounds: float | None) -> Any:
    """Checks a setting unless it is None."""
    return None if value is None else check(name, value, *bounds)


def _temperature(value: Any) -> float:
    return 0.0 if check_number("temperature", value) == 0 else _positive("temperature", value, "be 0 or ")


def _positive(name: str, value: Any, otherwise: str = "") -> float:
    """A number by which float32 values may be divided and multiplied."""
    number = check_number(name, value)
    if not COLDEST <= number <= HOTTEST:
        raise ValueError(f"{name} must {otherwise}lie in [{COLDEST}, {HOTTEST}], not {shown(value)}")
    return number


def _bounded(name: str, value: Any, most: float) -> float:
    """A number in [-most, most]."""
    number = check_number(name, value)
    if not -most <= number <= most:
        raise ValueError(f"{name} must lie in [{-most:g}, {most:g}], not {shown(value)}")
    return number


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Biases as pairs sorted by token, from a mapping or from such pairs."""
    pairs = given.items() if isinstance(given, Mapping) else given or ()
    checked = {}
    for pair in pairs if isinstance(given, Mapping | tuple | None) else [given]:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"logit_bias must be a mapping of token ids to numbers, not {shown(given)}")
        token = check_integer("a token id in logit_bias", pair[0], 0)
        if token in checked:
            raise ValueError(f"logit_bias has token {token} twice: give each token once")
        checked[token] = _bounded(f"the bias of token {token} in logit_bias", pair[1], MOST_BIAS)
    return tuple(sorted(checked.items()))


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    checked = _as_list(name, values, "token ids")
    return tuple(check_integer(f"a token id in {name}", token, 0) for token in checked)


def _share(name: str, value: Any, least: float | None) -> float:
    """A number in [least, 1], or in (0, 1] if ``least`` is None."""
    share = check_number(name, value)
    if not (0 < share <= 1 or share == least):
        bounds = "(0, 1]" if least is None else f"[{least:g}, 1]"
        raise ValueError(f"{name} must lie in {bounds}, or be None, not {shown(value)}")
    return share


def _texts(name: str, kind: str, values: Any) -> tuple[str, ...]:
    """A tuple of non-empty strings; ``kind`` is their name in errors."""
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
