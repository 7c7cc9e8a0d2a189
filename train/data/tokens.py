"""The corpus as streams of token ids, and windows cut from them. Shapes: B windows of T tokens.

A stream is one flat array that lives on the device: a step draws its windows there, from a key that follows
from the step's number, so a run has no data state beyond that number.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt16

from jetspec_jax.checkpoint.files import replacing
from train.data.corpus import LIBRARY, Source
from train.data.tokenizer import END_OF_TEXT, Tokenizer

Stream = UInt16[np.ndarray, "_"]


def encode_split(
    tokenizer: Tokenizer, documents: Mapping[Source, str], split: str, *, library_repeats: int = 1
) -> Stream:
    """One stream of a split's documents in a fixed random order, each after an end-of-text token.

    Args:
        tokenizer: Turns text into ids.
        documents: The corpus.
        split: Which documents to take.
        library_repeats: How often library code appears for once that tests do. Two thirds of the source
            are tests; a window drawn uniformly would mostly be assertions.
    """
    chosen = [source for source in documents if source.split == split]
    rng = np.random.default_rng(0)
    chosen = [chosen[i] for i in rng.permutation(len(chosen))]
    encoded = tokenizer.encode_all([documents[source] for source in chosen])
    return concatenate(
        (
            ids
            for source, ids in zip(chosen, encoded, strict=True)
            for _ in range(library_repeats if source.kind == LIBRARY else 1)
        ),
        tokenizer.id_of(END_OF_TEXT),
    )


def concatenate(documents: Iterable[list[int]], separator: int) -> Stream:
    """Joins documents, each with the separator before it."""
    parts = [np.asarray([separator, *ids], np.uint16) for ids in documents]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


def draw_windows(
    key: Key[Array, ""], stream: UInt16[Array, "S"], batch: int, length: int
) -> Int[Array, "B T"]:
    """Windows that begin anywhere in the stream.

    Raises:
        ValueError: The stream is shorter than a window.
    """
    if stream.shape[0] < length:
        raise ValueError(f"a stream of {stream.shape[0]} tokens has no window of {length}")
    starts = jax.random.randint(key, (batch,), 0, stream.shape[0] - length + 1)
    return stream[starts[:, None] + jnp.arange(length)[None, :]].astype(jnp.int32)


def line_starts(
    stream: Stream, newline_ids: Int[np.ndarray, "n"], *, before_end: int
) -> Int[np.ndarray, "m"]:
    """Indices of tokens that follow a newline and have at least ``before_end`` tokens from there on."""
    after = np.flatnonzero(np.isin(stream, newline_ids)) + 1
    return after[after + before_end <= len(stream)]


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes an array whole or not at all."""
    with replacing(path) as partial, partial.open("wb") as file:
        np.save(file, array)
