"""Encodes bad words, and checks that a request leaves some token to choose."""

from collections.abc import Collection, Sequence

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.engine.prompts import check_ids
from jetspec_jax.sampling.adjust import MOST_BAD_WORDS, MOST_WORD_TOKENS
from jetspec_jax.sampling.params import SamplingParams


def encode_bad_words(target: Target, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, both at the beginning of a text and after a space.

    Raises:
        ValueError: There is no tokenizer, a word has no tokens or too many, or there are too many words.
    """
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
    """Checks that the token ids in a request's parameters exist, and that some token can be chosen.

    ``words`` are the tokens of each bad word, ``endings`` tokens that are forbidden before ``min_tokens``.

    Raises:
        ValueError: A token id is outside the vocabulary, or every token is forbidden.
    """
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
