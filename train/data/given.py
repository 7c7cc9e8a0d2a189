"""Folders of existing documents, without generation by a target."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from jetspec_jax.progress import Progress
from train.data.documents import Writer
from train.data.manifest import CORPUS, DocumentsSettings
from train.data.records import Document, encode
from train.loop.stages import Deadline


def write_given(
    folder: Path,
    documents: Sequence[Document],
    *,
    target: str,
    vocab_size: int,
    source: str,
    held: Sequence[int],
    sources: Sequence[str] | None = None,
    shard_documents: int,
    deadline: Deadline,
) -> bool:
    """Writes a folder of documents or its missing shards; returns whether any were missing.

    Args:
        documents: All documents, including held-out documents.
        target: The name of the target whose tokenizer made the tokens.
        held: Indices of the held-out documents, in order.
        sources: The name of each document's source; None is ``source`` for all.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
        ValueError: The folder was begun with other settings, or a setting is out of its range.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(encode(document))
    settings = DocumentsSettings(
        mode=CORPUS,
        target=target,
        vocab_size=vocab_size,
        dtype=None,
        temperatures=(),
        sampling={},
        seed=(),
        source=source,
        sha256=digest.hexdigest(),
        count=len(documents),
        heldout=len(held),
        shard_documents=shard_documents,
    )
    writer = Writer(folder, settings, held, sources)
    missing = writer.missing
    done = settings.count - sum(len(planned.indices) for planned in missing)
    with Progress(
        total=settings.count, initial=done, desc="documents", unit=" documents", delay=1, leave=False
    ) as bar:
        for planned in missing:
            deadline.check(writer.progress)
            writer.write(planned, [documents[index] for index in planned.indices], None)
            bar.update(len(planned.indices))
    return bool(missing)
