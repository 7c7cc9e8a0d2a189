"""Lets a target continue prompts and writes the results as a folder of documents."""

import hashlib
import json
import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jetspec_jax.cache.pages import pages_for
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.admission import check_models, make_requests
from jetspec_jax.engine.engines import Engines
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.engine.prompts import TokenIds
from jetspec_jax.engine.request import Request
from jetspec_jax.progress import Progress
from jetspec_jax.sampling.params import SamplingParams
from train.data.documents import Writer
from train.data.manifest import REGENERATE, DocumentsSettings, PlannedShard
from train.data.records import Document
from train.loop.stages import Deadline, OutOfTime

# The sampling settings that a document depends on, besides its seed.
SAMPLED_BY = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
)


class Prompts(NamedTuple):
    """Prompts to continue, and how.

    Attributes:
        tokens: Token ids of each prompt.
        params: Sampling settings of each prompt; `document_seed` replaces the seed.
    """

    tokens: Sequence[TokenIds]
    params: Sequence[SamplingParams]


def document_seed(seed: Sequence[int], index: int) -> int:
    """The sampling seed of a document, which does not depend on shards and slots."""
    return int(np.random.SeedSequence([*seed, index]).generate_state(1, np.uint64)[0])


def regeneration_settings(
    prompts: Prompts,
    *,
    target: str,
    vocab_size: int,
    dtype: str,
    seed: Sequence[int],
    source: str,
    heldout: int,
    shard_documents: int,
) -> DocumentsSettings:
    """The settings of a folder of regenerated documents, see `DocumentsSettings`.

    Raises:
        ValueError: There are no prompts, or a number is out of its range.
    """
    if min(seed, default=0) < 0:
        raise ValueError(f"the seed must be at least 0, not {min(seed)}")
    digest, seen = hashlib.sha256(), {name: {} for name in SAMPLED_BY}
    for tokens, params in zip(prompts.tokens, prompts.params, strict=True):
        sampling = {name: getattr(params, name) for name in SAMPLED_BY}
        digest.update(json.dumps([len(np.asarray(tokens)), sampling]).encode())
        digest.update(np.asarray(tokens, "<i4").tobytes())
        for name, value in sampling.items():
            seen[name][value] = None
    lengths = [int(value) for value in seen.pop("max_tokens")]
    return DocumentsSettings(
        mode=REGENERATE,
        target=target,
        vocab_size=vocab_size,
        dtype=dtype,
        temperatures=tuple(sorted(seen.pop("temperature"))),
        # Lengths may be as many as the prompts: only the least and the most are kept.
        sampling={
            "max_tokens": [min(lengths, default=0), max(lengths, default=0)],
            **{name: list(values) for name, values in seen.items()},
        },
        seed=tuple(seed),
        source=source,
        sha256=digest.hexdigest(),
        count=len(prompts.tokens),
        heldout=heldout,
        shard_documents=shard_documents,
    )


def regenerate(
    writer: Writer,
    target: Target,
    prompts: Prompts,
    *,
    head: Head | None = None,
    tree: TreeSettings = PLAIN,
    slots: int,
    deadline: Deadline,
) -> None:
    """Writes the missing shards: each document is a prompt and the target's continuation of it.

    A continuation keeps the end-of-sequence token that ended it, and all its tokens are to be learnt.

    Args:
        writer: The folder; its settings are those of these prompts.
        head: A draft head, which makes it faster and changes no output.
        deadline: Checked before a shard is begun; shards that were begun are finished.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
        ValueError: A request cannot be served, or several processes share the target; nothing is written
            then.
        DeviceMemoryError: The device cannot hold so many slots.
    """
    if spans(target.mesh):
        raise ValueError("several processes share the target: regenerate in one process, on its own devices")
    todo, seed = deque(writer.missing), writer.settings.seed
    if not todo:
        return
    deadline.check(writer.progress)
    params = [replace(each, seed=document_seed(seed, index)) for index, each in enumerate(prompts.params)]
    check_models(target, head)
    models = target.config, None if head is None else head.config
    plan = plan_engine(*models, tree, target.dtype, slots=slots, mesh=target.mesh)
    requests = make_requests(target, plan, tree, prompts.tokens, params)
    # The longest of all documents, finished ones included: a resumed run has the same shapes.
    longest = max(request.most_tokens for request in requests)
    plan = replace(plan, size=replace(plan.size, capacity=longest, num_pages=slots * pages_for(longest)))
    engines, news, count = Engines(target, head, plan), queue.SimpleQueue[None](), writer.settings.count
    for request in requests:
        request.on_update = lambda: news.put(None)

    begun: list[tuple[PlannedShard, list[Request]]] = []
    done = count - sum(len(planned.indices) for planned in todo)
    bar = Progress(total=count, initial=done, desc="regenerate", unit=" documents", mininterval=1)
    try:
        while todo or begun:
            # The next shard begins before this one is finished, so that no slot is idle.
            while todo and sum(map(_unfinished, begun)) < slots and not deadline.passed():
                planned = todo.popleft()
                begun.append((planned, [requests[index] for index in planned.indices]))
                engines.submit(begun[-1][1])
            if not begun:
                raise OutOfTime(writer.progress)
            news.get()
            while not news.empty():  # a dispatch brings news of many requests
                news.get()
            finished = [shard for shard in begun if not _unfinished(shard)]
            begun = [shard for shard in begun if _unfinished(shard)]
            for planned, served in finished:
                writer.write(planned, [_document(request) for request in served], _count_stopped(served))
                done += len(served)
            bar.update(done + sum(len(shard[1]) - _unfinished(shard) for shard in begun) - bar.n)
    finally:
        bar.close()
        engines.close()  # later steps need the memory


def _unfinished(shard: tuple[PlannedShard, list[Request]]) -> int:
    return sum(request.readable[1] is None for request in shard[1])


def _count_stopped(requests: Sequence[Request]) -> int:
    """Number of requests that ended at a stop token; raises the first request's error."""
    for request in requests:
        if request.error is not None:
            raise request.error
    return sum(request.readable[1] == "stop" for request in requests)


def _document(request: Request) -> Document:
    output = np.asarray(request.tokens, np.int32)
    learn = np.arange(len(request.prompt) + len(output)) >= len(request.prompt)
    return Document(np.concatenate([request.prompt, output]), learn)
