"""Makes a folder of documents from prompts or conversations, for ``python -m train data``."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jetspec_jax.checkpoint.content import SMALL_PATTERNS
from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.checkpoint.hub import resolve
from jetspec_jax.checkpoint.loading import read_draft_head, read_target
from jetspec_jax.checkpoint.pairs import draft_head_at
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.tokenizer import load_tokenizer, read_eos_token_ids
from jetspec_jax.config import check_head_fits
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.demo import DEMO
from jetspec_jax.sampling.params import SamplingParams
from train.data.documents import Writer
from train.data.encoding import Found, encode_entries
from train.data.given import write_given
from train.data.holdout import default_heldout, hold_out
from train.data.keys import check_ignored
from train.data.manifest import CORPUS, MODES, REGENERATE, DocumentsManifest, Shard
from train.data.mixing import DEDUPLICATIONS, NONE, distinct_turns, mix
from train.data.prompts import Dropped, Entry, read_entries
from train.data.records import Document
from train.data.regenerate import Prompts, regenerate, regeneration_settings
from train.data.rendering import Encoder
from train.loop.stages import Deadline

#: Which turns of a conversation the target answers.
LAST, EVERY = TURNS = ("last", "every")
#: Default limit on the tokens of a continuation.
MAX_TOKENS = 1024
#: The file that lists all unusable rows.
REFUSED = "refused.json"


@dataclass(frozen=True)
class Made:
    """A summary of a folder of documents.

    Attributes:
        duplicates: Documents that repeat an earlier document's prompt, or in mode corpus its text;
            ``deduplicate`` omits them.
        ended: Documents that end with an end-of-sequence token; None if nothing was generated.
        unusable: Rows that were dropped because they are excluded, are not prompts, or have no tokens to
            learn.
        was_finished: Whether the folder was complete before.
    """

    folder: Path
    documents: int
    heldout: int
    duplicates: int
    tokens: int
    learn_tokens: int
    ended: int | None
    skipped: int
    unusable: int
    was_finished: bool


def make_data(
    target: str | Path,
    prompts: str | Path | Sequence[str | Path],
    out: Path,
    *,
    mode: str = REGENERATE,
    turns: str = LAST,
    weights: Sequence[float] | None = None,
    deduplicate: str = NONE,
    draft_head: str | Path | None = None,
    budget: int | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    heldout: int | None = None,
    need_heldout: bool = False,
    shard_documents: int = 256,
    slots: int = 32,
    dtype: str = "auto",
    limit: int | None = None,
    skip_too_long: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    ignore_config_keys: Collection[str] = (),
    ignore_data_keys: Collection[str] = (),
    deadline: Deadline | None = None,
    mesh: Mesh | None = None,
) -> Made:
    """Makes or completes a folder of documents; a finished folder is not changed.

    All prompts are read and checked before the target's weights are loaded. Unusable rows are dropped: the
    log lists the first of them, and the folder's ``refused.json`` all. The arguments are the options of
    ``python -m train data``, and these:

    Args:
        need_heldout: Whether to raise if no document would be held out.
        deadline: Checked before each shard.
        mesh: The devices that shard the target and the head, from `jetspec_jax.device.mesh.make_mesh`; None
            is one device. It does not change the documents.

    Raises:
        OutOfTime: The deadline passed; the same call resumes.
        FileNotFoundError: Target, draft head or prompts cannot be found.
        ValueError: A setting is not valid, no row can be used, or the folder was begun with other settings.
        DeviceMemoryError: The device cannot hold the models with so many slots.
    """
    if mode not in MODES:
        raise ValueError(f"the mode is one of {', '.join(MODES)}, not {mode!r}")
    generation = {
        "turns": (turns, LAST),
        "draft_head": (draft_head, None),
        "budget": (budget, None),
        "temperature": (temperature, 0.0),
        "top_p": (top_p, None),
        "top_k": (top_k, None),
        "max_tokens": (max_tokens, MAX_TOKENS),
    }
    idle = [name for name, (value, usual) in generation.items() if value != usual]
    if mode == CORPUS and idle:
        raise ValueError(f"mode corpus generates nothing; leave out {', '.join(idle)}")
    if slots < 1:
        raise ValueError(f"slots must be at least 1, not {slots}")
    for name, value, known in (("turns", turns, TURNS), ("deduplicate", deduplicate, DEDUPLICATIONS)):
        if value not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
    check_ignored(ignore_data_keys)
    deadline = Deadline() if deadline is None else deadline
    source = Source(target, dtype, ignore_config_keys)
    head_source = None
    if draft_head is not None:
        head_source = Source(draft_head_at(draft_head), dtype, ignore_config_keys)
    config, resolved = source.target_config, source.weights_dtype
    tree = PLAIN
    if head_source is not None:
        check_head_fits(head_source.head_config, config)
        if budget is None:
            budget = 1 if jax.default_backend() == "cpu" else 64
        tree = TreeSettings(budget=budget)
        tree.check(config, head_source.head_config.depth)
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, seed=seed
    )
    # The weights of a hub id are fetched only after the prompts are checked.
    folder = resolve(source.path_or_id, SMALL_PATTERNS)
    tokenizer = load_tokenizer(folder)
    end_ids = read_eos_token_ids(folder, tokenizer, config.vocab_size)
    encoder = Encoder(tokenizer, end_ids, template_arguments or {})
    dropped = Dropped()
    sources = [prompts] if isinstance(prompts, str | Path) else list(prompts)
    names = source_names(sources)
    entries = mix(
        [
            [
                replace(entry, source=name)
                for entry in read_entries(path, limit, dropped=dropped, ignore_data_keys=ignore_data_keys)
            ]
            for path, name in zip(sources, names, strict=True)
        ],
        weights,
    )
    context = config.max_position_embeddings

    def as_documents(entry: Entry) -> list[Document]:
        tokens = encoder.prompts(entry, every=turns == EVERY)
        return [Document(ids, np.zeros(len(ids), bool)) for ids in tokens]

    encode, most = (encoder.documents, context) if mode == CORPUS else (as_documents, context - 1)
    found, skipped = encode_entries(encoder, encode, entries, most, skip_too_long, dropped)
    first: dict[bytes, Found] = {}
    for each in found:
        first.setdefault(each.document.tokens.tobytes(), each)
    repeats = len(found) - len(first)
    if mode == CORPUS:
        taught = distinct_turns([each.document for each in found], deduplicate)
        pairs = zip(found, taught, strict=True)
        found = [each._replace(document=document) for each, document in pairs if document is not None]
    elif deduplicate != NONE:
        found = [*first.values()]
    held = _held([each.root for each in found], heldout, need_heldout)
    of_each = [each.source for each in found]
    common = {"target": name_of(target), "vocab_size": config.vocab_size, "source": ", ".join(names)}
    common["shard_documents"] = shard_documents

    if mode == CORPUS:
        documents = [each.document for each in found]
        finished = not write_given(out, documents, **common, held=held, sources=of_each, deadline=deadline)
        _report(out, dropped)
    else:
        tokens = [each.document.tokens for each in found]
        rooms = [context - len(ids) for ids in tokens]
        params = [replace(sampling, max_tokens=min(room, sampling.max_tokens or room)) for room in rooms]
        requests = Prompts(tokens, params)
        settings = regeneration_settings(
            requests, **common, dtype=str(resolved), seed=(seed,), heldout=len(held)
        )
        writer = Writer(out, settings, held, of_each)
        _report(out, dropped)
        finished = not writer.missing
        if not finished:
            deadline.check(writer.progress)
            loaded = read_target(source, mesh)
            head = None
            if head_source is not None and tree.budget > 1:
                head = read_draft_head(head_source, loaded)
            regenerate(writer, loaded, requests, head=head, tree=tree, slots=slots, deadline=deadline)
    return _made(out, repeats, skipped, len(dropped.reasons), finished)


def _held(keys: list[bytes], heldout: int | None, need: bool) -> list[int]:
    """Indices of the held-out documents."""
    if need and len(set(keys)) < 2:
        raise ValueError("at least 2 different prompts are needed, one of them to measure the head on")
    count = default_heldout(len(keys)) if heldout is None else heldout
    if need and not count:
        raise ValueError("at least 1 document must be held out, to measure the head on, not 0")
    return hold_out(keys, count)


def name_of(target: str | Path) -> str:
    """The target's name in a manifest: its hub id, or its folder's name."""
    folder = Path(target).expanduser()
    return folder.resolve().name if target != DEMO and folder.is_dir() else str(target)


def source_names(sources: Sequence[str | Path]) -> list[str]:
    """The sources' names in a manifest: a path's last part, numbered if it repeats."""
    plain = [Path(source).absolute().name if Path(source).exists() else str(source) for source in sources]
    return [
        name if name not in plain[:index] else f"{name} ({plain[:index].count(name) + 1})"
        for index, name in enumerate(plain)
    ]


def _report(folder: Path, dropped: Dropped) -> None:
    """Writes the reason for each unusable row, without its text."""
    if dropped.reasons:
        write_json(folder / REFUSED, {"refused": dropped.reasons})


def _made(folder: Path, duplicates: int, skipped: int, unusable: int, was_finished: bool) -> Made:
    manifest = DocumentsManifest.read(folder)
    found = (Shard.read(folder, planned) for planned in manifest.planned())
    shards = [shard for shard in found if shard is not None]
    ended = [shard.ended for shard in shards if shard.ended is not None]
    return Made(
        folder,
        manifest.settings.count,
        manifest.settings.heldout,
        duplicates,
        sum(shard.tokens for shard in shards),
        sum(shard.learn_tokens for shard in shards),
        sum(ended) if ended else None,
        skipped,
        unusable,
        was_finished,
    )
