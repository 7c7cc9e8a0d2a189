"""Folders of documents, written and read back, and of a target, for the tests of several rooms."""

import numpy as np
from flax import nnx

from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.models import build, weights_of
from tests.decode.tiny import TINY
from train.data.documents import Documents, Writer
from train.data.holdout import default_heldout, evenly_spaced
from train.data.manifest import HELDOUT, TRAIN, DocumentsManifest, DocumentsSettings, Shard
from train.data.records import learn_spans
from train.head.config import decoder_json


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


def begin(folder, count, held=None, sources=None, **changes):
    """The writer of a folder; without ``held`` it holds out evenly spaced documents."""
    if held is not None:
        changes["heldout"] = len(held)
    chosen = settings(count, **changes)
    return Writer(folder, chosen, evenly_spaced(count, chosen.heldout) if held is None else held, sources)


def write(folder, documents, shards=None, **changes):
    """Writes what a folder lacks of some documents, or only so many shards of it."""
    writer = begin(folder, len(documents), **changes)
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


def learnt(tokenizer, document, *, special=False):
    """The text of each run of tokens to learn, with special tokens if asked for."""
    runs = [document.tokens[begin:end].tolist() for begin, end in learn_spans(document.learn)]
    return [tokenizer.decode(run, skip_special_tokens=not special) for run in runs]


def write_target(folder):
    """A random target with the demo's tokenizer and chat template."""
    raw = {**decoder_json(TINY, 2, TINY.layers[0].mlp_size), "vocab_size": 4096, "eos_token_id": 0}
    files = {name: (DEMO_TARGET / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    weights = weights_of(build(parse_model_config(raw), rngs=nnx.Rngs(0)))
    save_checkpoint(folder, raw, weights, extra_files=files)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def same(one, other):
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.learn, other.learn)


def shards_of(folder):
    found = (Shard.read(folder, plan) for plan in DocumentsManifest.read(folder).planned())
    return [shard for shard in found if shard is not None]
