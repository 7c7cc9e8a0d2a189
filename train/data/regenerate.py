"""Text written by the target: the batched engine continues prompts, into a folder of documents."""

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.request import Request, TokenIds, check_request
from jetspec_jax.generate import slots_for
from jetspec_jax.sampling.params import SamplingParams
from train.data.documents import Writer
from train.data.manifest import REGENERATE, Settings, ShardPlan
from train.data.records import Document
from train.loop.stages import Deadline

# What a document depends on, besides the target, its prompt and its seed.
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
    """What to continue, and how.

    Attributes:
        tokens: Token ids of each prompt.
        params: Each prompt's sampling; its seed is not used, see `document_seed`.
    """

    tokens: Sequence[TokenIds]
    params: Sequence[SamplingParams]


def document_seed(seed: Sequence[int], index: int) -> int:
    """The seed of one document's sampling: it depends on nothing else, so shards and slots do not matter."""
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
) -> Settings:
    """What a folder of regenerated documents is made with.

    Args:
        prompts: All of them.
        target: The target's name.
        vocab_size: The target's.
        dtype: What it computes in.
        seed: Numbers of at least 0.
        source: Where the prompts come from.
        heldout: How many documents are not for training.
        shard_documents: Most documents of a shard.

    Raises:
        ValueError: There are no prompts, or a number is out of its range.
    """
    if min(seed, default=0) < 0:
        raise ValueError(f"the seed must be at least 0, not {min(seed)}")
    digest, seen = hashlib.sha256(), {name: {} for name in SAMPLED_BY}
    for tokens, params in zip(prompts.tokens, prompts.params, strict=True):
        own = {name: getattr(params, name) for name in SAMPLED_BY}
        digest.update(json.dumps([len(np.asarray(tokens)), own]).encode())
        digest.update(np.asarray(tokens, "<i4").tobytes())
        for name, value in own.items():
            seen[name][value] = None
    lengths = [int(value) for value in seen.pop("max_tokens")]
    return Settings(
        mode=REGENERATE,
        target=target,
        vocab_size=vocab_size,
        dtype=dtype,
        temperatures=tuple(sorted(seen.pop("temperature"))),
        # Of the lengths, which may be as many as the prompts, the least and the most.
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
    """Writes the shards that are missing: each document is a prompt and the target's continuation of it.

    A continuation keeps the end-of-sequence token that ended it, and all its tokens are to be learnt.

    Args:
        writer: The folder; its settings are those of these prompts.
        target: Who writes.
        prompts: What to continue.
        head: A draft head, which makes it faster and changes nothing.
        tree: The head's trees.
        slots: Documents written at a time.
        deadline: Checked before a shard is begun; what was begun is finished.

    Raises:
        OutOfTime: The deadline passed; calling again writes the others.
        ValueError: A request cannot be served; nothing has been written then.
        DeviceMemoryError: The device cannot hold so many slots.
    """
    todo, seed = deque(writer.missing), writer.settings.seed
    if not todo:
        return
    deadline.check(writer.progress)
    for tokens, params in zip(prompts.tokens, prompts.params, strict=True):
        check_request(target, tokens, params)
    count = writer.settings.count
    lengths = [
        len(np.asarray(tokens)) + params.max_tokens
        for tokens, params in zip(prompts.tokens, prompts.params, strict=True)
    ]
    engine = Engine(
        replace(target, tokenizer=None),  # only ids are wanted
        head,
        tree,
        slots=slots_for(count, slots),
        # Of all documents, not of those left, so that a run that goes on computes in the same shapes; and no
        # longer, so that attention does not walk pages that stay empty.
        capacity=max(lengths),
    )

    def submit(index: int) -> Request:
        params = replace(prompts.params[index], seed=document_seed(seed, index))
        return engine.submit(prompts.tokens[index], params)

    begun: list[tuple[ShardPlan, list[Request]]] = []
    done = count - sum(len(plan.indices) for plan in todo)
    with tqdm(total=count, initial=done, desc="regenerate", unit=" documents", mininterval=1) as bar:
        while todo or begun:
            # The next shard begins while the last documents of this one are written: no slot is idle.
            while todo and sum(map(_unfinished, begun)) < engine.size.slots and not deadline.passed():
                plan = todo.popleft()
                begun.append((plan, [submit(index) for index in plan.indices]))
            if not begun:
                deadline.stop(writer.progress)
            engine.step()
            finished = [shard for shard in begun if not _unfinished(shard)]
            begun = [shard for shard in begun if _unfinished(shard)]
            for plan, requests in finished:
                ended = sum(request.output.finish_reason == "stop" for request in requests)
                writer.write(plan, [_document(request) for request in requests], ended)
                done += len(requests)
            bar.update(done + sum(len(s[1]) - _unfinished(s) for s in begun) - bar.n)


def _unfinished(shard: tuple[ShardPlan, list[Request]]) -> int:
    return sum(request.output.finish_reason is None for request in shard[1])


def _document(request: Request) -> Document:
    own = np.asarray(request.output.token_ids, np.int32)
    learn = np.arange(len(request.prompt) + len(own)) >= len(request.prompt)
    return Document(np.concatenate([request.prompt, own]), learn)
