"""The corpus as streams of token ids, and windows cut from them. Shapes: B windows of T tokens.

A stream is one flat array on the device. A step draws its windows there with a key that depends on the step's
number, so the position in the data is that number.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key, UInt16

from jetspec_jax.checkpoint.files import replacing
from train.demo.corpus import LIBRARY, CorpusFile
from train.demo.tokenizer import END_OF_TEXT, Tokenizer

Stream = UInt16[np.ndarray, "_"]


def encode_split(
    tokenizer: Tokenizer, sources: Mapping[CorpusFile, str], split: str, *, library_repeats: int = 1
) -> Stream:
    """One stream of a split's files in a fixed random order, each after an end-of-text token.

    Args:
        tokenizer: The tokenizer.
        sources: The texts of the corpus.
        split: The split.
        library_repeats: How often library code occurs; tests, two thirds of the source, occur once.
    """
    chosen = [source for source in sources if source.split == split]
    rng = np.random.default_rng(0)
    chosen = [chosen[i] for i in rng.permutation(len(chosen))]
    encoded = tokenizer.encode_all([sources[source] for source in chosen])
    return concatenate(
        (
            ids
            for source, ids in zip(chosen, encoded, strict=True)
            for _ in range(library_repeats if source.kind == LIBRARY else 1)
        ),
        tokenizer.id_of(END_OF_TEXT),
    )


def concatenate(texts: Iterable[list[int]], separator: int) -> Stream:
    """Joins texts, each after a separator."""
    parts = [np.asarray([separator, *ids], np.uint16) for ids in texts]
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
