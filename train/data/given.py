"""Documents that are there already: nobody writes them anew."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from train.data.documents import Writer
from train.data.manifest import CORPUS, Settings
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
    shard_documents: int,
    deadline: Deadline,
) -> bool:
    """Writes a folder of documents, or what is missing of one; says whether anything was.

    Args:
        folder: Where.
        documents: All of them, those held out included.
        target: The name of the target whose tokens they are.
        vocab_size: Its vocabulary.
        source: Where they come from.
        held: Indices of the documents that are not for training, in order.
        shard_documents: Most documents of a shard.
        deadline: Checked before a shard is begun.

    Raises:
        OutOfTime: The deadline passed; calling again goes on.
        ValueError: The folder was begun with other settings, or a setting is out of its range.
    """
    digest = hashlib.sha256()
    for document in documents:
        digest.update(encode(document))
    settings = Settings(
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
    writer = Writer(folder, settings, held)
    missing = writer.missing
    done = settings.count - sum(len(plan.indices) for plan in missing)
    with tqdm(
        total=settings.count, initial=done, desc="documents", unit=" documents", delay=1, leave=False
    ) as bar:
        for plan in missing:
            deadline.check(writer.progress)
            writer.write(plan, [documents[index] for index in plan.indices], None)
            bar.update(len(plan.indices))
    return bool(missing)
