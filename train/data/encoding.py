"""Encodes entries, and drops unusable entries."""

from collections.abc import Callable
from typing import NamedTuple

from jetspec_jax.progress import Progress
from train.data.prompts import Dropped, Entry
from train.data.records import Document
from train.data.rendering import Encoder


class Found(NamedTuple):
    """A document or a prompt, and where it comes from.

    Attributes:
        document: The document. Of a prompt, no token is to be learnt.
        root: The root of its conversation.
        source: The name of its source.
    """

    document: Document
    root: bytes
    source: str


def encode_entries(
    encoder: Encoder,
    encode: Callable[[Entry], list[Document]],
    entries: list[Entry],
    most: int,
    skip: bool,
    dropped: Dropped,
) -> tuple[list[Found], int]:
    """The encoded entries in order, and the number of skipped ones.

    Args:
        encode: Encodes an entry; errors are passed to ``dropped``.
        most: Most tokens of a document or prompt.
        skip: Whether those with more tokens are skipped.

    Raises:
        ValueError: There are too many tokens, or no entry is usable.
    """
    found, skipped, usable = [], 0, 0
    for entry in Progress(entries, desc="prompts", unit=" prompts", delay=1, leave=False):
        try:
            documents, root = encode(entry), encoder.root(entry)
        except ValueError as error:
            dropped.add(error)
            continue
        usable += 1
        for document in documents:
            count = len(document.tokens)
            if count <= most:
                found.append(Found(document, root, entry.source))
            elif skip:
                skipped += 1
            else:
                raise ValueError(
                    f"{entry.where}: a text has {count} tokens, and the target's context has room for "
                    f"{most}; shorten it, or drop such texts with --skip-too-long"
                )
    dropped.check_rest(usable)
    return found, skipped
