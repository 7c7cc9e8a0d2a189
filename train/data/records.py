"""Documents as bytes: the records of their shards.

The encoding, version 1, little-endian::

    uint32  version of the encoding, 1
    uint32  n, the number of tokens
    int32   n token ids
    uint8   ceil(n / 8) bytes with a bit per token, the lowest bit first: whether to learn the token
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

RECORD_VERSION = 1


class Document(NamedTuple):
    """A text as token ids.

    Attributes:
        tokens: The token ids.
        learn: Whether to learn each token: those written by the assistant or the target.
    """

    tokens: Int32[np.ndarray, "n"]
    learn: Bool[np.ndarray, "n"]


def encode(document: Document) -> bytes:
    """A document as the bytes of a record."""
    header = np.array([RECORD_VERSION, len(document.tokens)], "<u4")
    bits = np.packbits(document.learn, bitorder="little")
    return header.tobytes() + document.tokens.astype("<i4").tobytes() + bits.tobytes()


def decode(record: bytes) -> Document:
    """The document of a record.

    Raises:
        ValueError: The bytes are not a record of this version.
    """
    if len(record) < 8:
        raise ValueError(f"a record has at least 8 bytes, not {len(record)}")
    version, count = np.frombuffer(record, "<u4", 2).tolist()
    if version != RECORD_VERSION:
        raise ValueError(f"the record's encoding is version {version}, and this is {RECORD_VERSION}")
    size = 8 + 4 * count + -(-count // 8)
    if len(record) != size:
        raise ValueError(f"a record of {count} tokens has {size} bytes, not {len(record)}")
    tokens = np.frombuffer(record, "<i4", count, offset=8).astype(np.int32)
    bits = np.frombuffer(record, np.uint8, offset=8 + 4 * count)
    return Document(tokens, np.unpackbits(bits, count=count, bitorder="little").astype(bool))


def learn_spans(learn: Bool[np.ndarray, "n"]) -> list[list[int]]:
    """The runs of true entries as ``[start, stop]``: ``. x x . x`` gives ``[1, 3], [4, 5]``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], learn, [False])).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()
