"""Encodes entries, and drops unusable entries."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int32

from jetspec_jax.config import ModelConfig
from jetspec_jax.progress import Progress
from jetspec_jax.sampling.params import SamplingParams
from train.data.prompts import Dropped, Entry
from train.data.records import Document
from train.data.regenerate import Prompts
from train.data.rendering import Encoder

T = TypeVar("T")


class Origin(NamedTuple):
    """Where a document or prompt comes from.

    Attributes:
        root: The root of its conversation.
        source: The name of its source.
    """

    root: bytes
    source: str


class Found(NamedTuple):
    """A document and its origin."""

    document: Document
    origin: Origin


def encode_prompts(
    encoder: Encoder,
    entries: list[Entry],
    config: ModelConfig,
    sampling: SamplingParams,
    skip: bool,
    dropped: Dropped,
    *,
    every: bool,
) -> tuple[Prompts, list[Origin], int]:
    """The encoded prompts with sampling settings, their origins, and the number of too long prompts."""

    def encode(entry: Entry) -> tuple[list[Int32[np.ndarray, "T"]], Origin]:
        return encoder.prompts(entry, every=every), Origin(encoder.root(entry), entry.source)

    context, tokens, params, origins, skipped = config.max_position_embeddings, [], [], [], 0
    for entry, (prompts, origin) in _encoded(encode, entries, dropped):
        for ids in prompts:
            room = context - len(ids)
            if room > 0:
                tokens.append(ids)
                origins.append(origin)
                params.append(replace(sampling, max_tokens=min(room, sampling.max_tokens or room)))
            elif skip:
                skipped += 1
            else:
                raise ValueError(
                    f"{entry.where}: the prompt has {len(ids)} tokens, which leaves no room in a context of "
                    f"{context}; shorten it to {context - 1} or fewer, or drop such prompts with "
                    "--skip-too-long"
                )
    return Prompts(tokens, params), origins, skipped


def encode_documents(
    encoder: Encoder, entries: list[Entry], config: ModelConfig, skip: bool, dropped: Dropped
) -> tuple[list[Found], int]:
    """The encoded texts with their origins, and the number of skipped long texts."""

    def encode(entry: Entry) -> tuple[list[Document], Origin]:
        return encoder.documents(entry), Origin(encoder.root(entry), entry.source)

    context, found, skipped = config.max_position_embeddings, [], 0
    for entry, (documents, origin) in _encoded(encode, entries, dropped):
        for document in documents:
            if len(document.tokens) <= context:
                found.append(Found(document, origin))
            elif skip:
                skipped += 1
            else:
                raise ValueError(
                    f"{entry.where}: the document has {len(document.tokens)} tokens, beyond the target's "
                    f"context of {context}; shorten it, or drop such documents with --skip-too-long"
                )
    return found, skipped


def _encoded(
    encode: Callable[[Entry], T], entries: list[Entry], dropped: Dropped
) -> Iterator[tuple[Entry, T]]:
    """Pairs of each usable entry and its encoding.

    Raises:
        ValueError: No entry is usable; raised at the end.
    """
    usable = 0
    for entry in Progress(entries, desc="prompts", unit=" prompts", delay=1, leave=False):
        try:
            made = encode(entry)
        except ValueError as error:
            dropped.add(error)
        else:
            usable += 1
            yield entry, made
    dropped.check_rest(usable)
