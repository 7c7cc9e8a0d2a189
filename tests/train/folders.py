"""Folders of documents, written and read back by the tests of several rooms."""

import numpy as np

from train.data.documents import Documents, Writer
from train.data.holdout import default_heldout
from train.data.manifest import HELDOUT, TRAIN, DocumentsSettings


def settings(count, **changes):
    fields = {
        "mode": "corpus",
        "target": "tiny",
        "vocab_size": 1000,
        "dtype": None,
        "temperatures": (0.0, 0.8),
        "sampling": {"top_k": [None, 5]},
        "seed": (3, 1),
        "source": "prompts.jsonl",
        "sha256": "abc",
        "count": count,
        "heldout": default_heldout(count),
        "shard_documents": 4,
    }
    return DocumentsSettings(**{**fields, **changes})


def write(folder, documents, shards=None, **changes):
    """Writes what a folder lacks of some documents, or only so many shards of it."""
    writer = Writer(folder, settings(len(documents), **changes))
    for planned in writer.missing[:shards]:
        writer.write(planned, [documents[i] for i in planned.indices], len(planned.indices) // 2)
    return writer


def read(folder):
    """All documents of a folder in the order in which they were given."""
    found = {}
    for split in (TRAIN, HELDOUT):
        documents = Documents.open(folder, split)
        found |= {int(n): documents[i] for i, n in enumerate(documents.numbers)}
    return [found[n] for n in sorted(found)]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def same(one, other):
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.learn, other.learn)
