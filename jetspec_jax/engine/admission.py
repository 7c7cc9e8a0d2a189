"""Checks each request once, before any work, and makes the engine's requests."""

import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from jetspec_jax.arguments import check_type, shown
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device.groups import Meshes, describe_meshes
from jetspec_jax.engine.grammars import matcher_for
from jetspec_jax.engine.plan import EnginePlan
from jetspec_jax.engine.prompts import EncodedPrompt, Prompt, check_ids, naming, read_prompt, read_prompts
from jetspec_jax.engine.request import Request
from jetspec_jax.sampling.adjust import MOST_BAD_WORDS, MOST_WORD_TOKENS
from jetspec_jax.sampling.grammar import Matcher
from jetspec_jax.sampling.params import SamplingParams, draw_seed
from jetspec_jax.tree import Hints
from jetspec_jax.tree.routing import hints_of_each

# Request ids of prompts without an id from the caller: consecutive numbers, as in vLLM.
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class CheckedRequest:
    """A prompt and its parameters, with ``max_tokens``, checked by `check_request`; see `Request`."""

    prompt: EncodedPrompt
    params: SamplingParams
    stop_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]
    endings: frozenset[int]
    matcher: Matcher | None

    def requests(
        self,
        settings: TreeSettings,
        decoder: TreeDecoder,
        hints: Hints | None = None,
        request_id: str | None = None,
    ) -> list[Request]:
        """One request for each of the ``n`` completions, with a random seed unless it has one.

        Without the caller's ``request_id`` they get the next number of this process.
        """
        prompt_id = str(next(_numbers)) if request_id is None else request_id
        return [
            Request(
                self.prompt.ids,
                params if params.seed is not None else replace(params, seed=draw_seed()),
                self.stop_ids,
                settings.budget,
                decoder.depth if settings.depth is None else settings.depth,
                tuple((hints or {}).items()),
                text=self.prompt.text,
                continues=self.prompt.continues,
                index=index,
                request_id=prompt_id,
                bad_words=self.bad_words,
                endings=self.endings,
                matcher=None if self.matcher is None else self.matcher.copy(),
                kept_special_tokens=self.prompt.kept_special_tokens,
            )
            for index, params in enumerate(self.params.each())
        ]


def check_request(
    target: Target, prompt: Prompt, params: SamplingParams | None = None, *, capacity: int | None = None
) -> CheckedRequest:
    """Checks a prompt and its parameters.

    The ``capacity`` is the number of tokens per slot; None is the target's whole context. Raises TypeError
    and ValueError, or ImportError for a grammar without llguidance.
    """
    params = SamplingParams() if params is None else params
    check_type("sampling_params", params, SamplingParams, "SamplingParams")
    config, read = target.config, read_prompt(target, prompt)
    bad_words, endings = encode_bad_words(target, params.bad_words), endings_of(target, params)
    check_choices_left(config.vocab_size, params, bad_words, endings)
    limit = min(config.max_position_embeddings, capacity or config.max_position_embeddings)
    if problem := context_overflow(len(read.ids), limit, params):
        raise ValueError(problem[1])
    most = limit - len(read.ids) if params.max_tokens is None else params.max_tokens
    if params.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the target has none; use stop_token_ids")
    stop_ids = stop_ids_of(target, params)
    matcher = matcher_for(target, params, stop_ids)
    return CheckedRequest(read, replace(params, max_tokens=most), stop_ids, bad_words, endings, matcher)


def context_overflow(
    count: int, limit: int, params: SamplingParams, names: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str] | None:
    """The argument that does not fit into a context, and the reason; None if all of them fit.

    The prompt has ``count`` tokens, the context ``limit``, output included; ``names`` are the caller's names
    of "prompt", "max_tokens" and "min_tokens", if others. Clients of servers know this error by its words:
    LiteLLM by "maximum context length is" and "prompt is too long", LangChain by the latter and
    "context_length_exceeded".
    """
    if count >= limit:
        reason = f"{count} tokens, and this model's maximum context length is {limit}"
        return names.get("prompt", "prompt"), f"the prompt is too long: {reason} (context_length_exceeded)"
    for name, tokens in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
        if tokens > limit - count:
            name = names.get(name, name)
            return name, (
                f"this model's maximum context length is {limit} tokens, but {count} prompt tokens and "
                f"{name}={shown(tokens)} need {shown(count + tokens)}; {name} could be at most "
                f"{limit - count} (context_length_exceeded)"
            )
    return None


def stop_ids_of(target: Target, params: SamplingParams) -> frozenset[int]:
    """Tokens that end a request: its stop tokens, and end-of-sequence tokens unless these are ignored."""
    return frozenset((*(params.stop_token_ids or ()), *(() if params.ignore_eos else target.eos_token_ids)))


def encode_bad_words(target: Target, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, both at the beginning of a text and after a space; ValueError if too many."""
    if not words:
        return ()
    if target.tokenizer is None:
        raise ValueError("bad_words need a tokenizer, and the target has none; use logit_bias")
    found: dict[tuple[int, ...], None] = {}
    for word in dict.fromkeys(words):
        for text in (word.lstrip(), f" {word.lstrip()}"):
            ids = target.tokenizer.encode(text, add_special_tokens=False)
            tokens = check_ids(ids, f"the bad word {shown(word)}", target.config.vocab_size)
            if not 1 <= len(tokens) <= MOST_WORD_TOKENS:
                has = f"{shown(word)} has {len(tokens)}"
                raise ValueError(f"a bad word must have 1 to {MOST_WORD_TOKENS} tokens, and {has}")
            found[tuple(tokens.tolist())] = None
        if len(found) > MOST_BAD_WORDS:
            raise ValueError(
                f"bad_words may be at most {MOST_BAD_WORDS} sequences of tokens, with and without a space "
                "before each word, and these are more"
            )
    return tuple(found)


def endings_of(target: Target, params: SamplingParams) -> frozenset[int]:
    """Tokens that `min_tokens` forbids: stop tokens and end-of-sequence tokens, even if these are ignored."""
    return frozenset({*(params.stop_token_ids or ()), *target.eos_token_ids})


def check_choices_left(
    vocab_size: int, params: SamplingParams, words: Collection[Sequence[int]], endings: Collection[int]
) -> None:
    """Raises ValueError unless the token ids in the parameters exist, and some token can be chosen."""
    allowed = params.allowed_token_ids
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", dict(params.logit_bias or ())),
        ("allowed_token_ids", allowed),
    ):
        outside = [token for token in tokens or () if token >= vocab_size]
        if outside:
            raise ValueError(
                f"token id {shown(outside[0])} in {name} lies outside the vocabulary 0..{vocab_size - 1}"
            )

    def count_allowed(forbidden: Collection[int]) -> int:
        return vocab_size - len(forbidden) if allowed is None else len(set(allowed) - set(forbidden))

    forbidden = {word[0] for word in words if len(word) == 1}
    if not count_allowed(forbidden):
        raise ValueError("no token could be chosen: bad_words forbid all allowed tokens")
    if params.min_tokens and not count_allowed(forbidden.union(endings)):
        raise ValueError(
            f"no token could be chosen before min_tokens={params.min_tokens}: all allowed tokens end the "
            "output"
        )


def make_requests(
    target: Target,
    plan: EnginePlan,
    settings: TreeSettings,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    routing: Hints | Sequence[Hints | None] | None = None,
    *,
    capacity: int | None = None,
) -> list[Request]:
    """Makes requests for engines of a plan, each checked once: ``n`` of its parameters for each prompt.

    Parameters and ``routing`` hints (see `jetspec_jax.tree.routing`) are for all prompts or for each. Slots
    have ``capacity`` tokens; None is the target's whole context. Raises as `check_request`.
    """
    read = read_prompts(target, prompts)
    params, hints = _of_each(sampling_params, len(read)), hints_of_each(routing, len(read), "prompts")
    requests: list[Request] = []
    for number, each in enumerate(zip(read, params, strict=True)):
        with naming(f"prompts[{number}]" if len(read) > 1 else ""):
            checked = check_request(target, *each, capacity=capacity)
        requests += checked.requests(settings, plan.decoder, hints[number])
    return requests


def check_single(sampling_params: SamplingParams | None) -> None:
    """Raises ValueError if ``n`` is not 1, for a stream or a trace."""
    if isinstance(sampling_params, SamplingParams) and sampling_params.n != 1:
        raise ValueError(f"n must be 1 for a stream or a trace, not {sampling_params.n}; use generate")


def check_models(target: object, head: object) -> None:
    """Checks the types and devices of the models (TypeError, ValueError), and the process (RuntimeError)."""
    check_type("the target", target, Target, "a Target, as load_target returns it")
    check_type("the draft head", head, Head | None, "a Head, as load_draft_head returns it")
    if isinstance(target, Target):
        if (process := os.getpid()) != target.process:
            raise RuntimeError(
                f"process {process} is a fork of process {target.process}, which loaded the models, and "
                'cannot use them: start processes by multiprocessing.get_context("spawn"), and load the '
                "models in each"
            )
        if isinstance(head, Head):
            check_places(target.meshes, head.meshes)


def check_places(target: Meshes, head: Meshes) -> None:
    """Raises ValueError if the draft head is not on the target's devices."""
    if head != target:
        raise ValueError(
            f"the draft head lies on {describe_meshes(head)} and the target on {describe_meshes(target)}: "
            "load both with the same mesh"
        )


def _of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if isinstance(sampling_params, str) or not isinstance(sampling_params, Sequence):
        raise TypeError(f"sampling_params must be SamplingParams or a list, not {shown(sampling_params)}")
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling_params for {count} prompts")
    return list(sampling_params)
