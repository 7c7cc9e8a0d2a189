"""Tiny models with random parameters, a tokenizer for them, and an engine to serve requests with."""

import dataclasses
import functools
import math
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers

from jetspec_jax import Head, Target
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import DraftHeadConfig, ModelConfig, Recurrence, Rope
from jetspec_jax.decode.settings import PLAIN
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.engine.policy import FixedBudget
from jetspec_jax.engine.request import State
from jetspec_jax.models import abstract, weights_of

# Head size times heads is not the hidden size, and theta is not the usual one: neither may be assumed.
TINY = ModelConfig.uniform(
    "qwen3",
    2,
    vocab_size=64,
    hidden_size=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=48,
    rope=Rope(5e5, 16),
)


# `TINY` as a config.json, and what a head adds to it.
_RAW = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
_RAW_HEAD = {
    "num_hidden_layers": 1,
    "block_size": 8,
    "num_target_layers": 2,
    "dflash_config": {"causal_head": True, "mask_token_id": 63, "target_layer_ids": [0, 1]},
}


def save_tiny_pair(folder):
    """`TINY` with random parameters, and a head for it, as checkpoints: the paths of both."""
    target, head = folder / "target", folder / "head"
    save_checkpoint(target, _RAW, random_weights(TINY, 0), dtype="float32")
    save_checkpoint(head, _RAW | _RAW_HEAD, random_weights(head_config(TINY), 1), dtype="float32")
    return str(target), str(head)


def with_windows(config, *windows):
    """The same model with as many of its first layer, and these windows."""
    layers = tuple(dataclasses.replace(config.layers[0], window=window) for window in windows)
    return dataclasses.replace(config, layers=layers)


def with_mlp(config, size):
    """The same model with feed-forward blocks of another size."""
    layers = tuple(dataclasses.replace(layer, mlp_size=size) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


SLIDING = dataclasses.replace(with_windows(TINY, 8, None), tie_word_embeddings=True)


# Recurrent layers behind one of attention, with three value heads to a key head, of another size.
HYBRID = dataclasses.replace(
    TINY,
    model_type="qwen3_5_text",
    layers=(
        TINY.layers[0],
        *[
            dataclasses.replace(
                TINY.layers[0],
                num_heads=0,
                num_kv_heads=0,
                head_dim=0,
                recurrence=Recurrence(2, 6, key_dim=8, value_dim=4, kernel=4),
            )
        ]
        * 2,
    ),
)


def head_config(target, block_size=8, causal=True):
    layers = dataclasses.replace(with_windows(target, None), tie_word_embeddings=False)
    return DraftHeadConfig(
        layers, block_size, target.num_layers, (0, target.num_layers - 1), target.vocab_size - 1, causal
    )


def random_weights(config, seed, std=0.2):
    """Every parameter is random, norms too: a term that is left out cannot hide behind a 0 or a 1.

    A deviation of 0.2 at hidden size 32 gives logits of deviation about 1, so that argmaxes vary.
    """
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        values = rng.standard_normal(shape.shape, np.float32)
        is_norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(1 + 0.1 * values if is_norm else std * values)

    return jax.tree_util.tree_map_with_path(draw, _shapes(config))


@functools.cache
def _shapes(config):
    return weights_of(abstract(config))


def random_target(config, seed, *, std=0.2, eos=(), tokenizer=None):
    return Target(config, random_weights(config, seed, std), eos, tokenizer)


def random_head(target_config, seed, **changes):
    config = head_config(target_config, **changes)
    return Head(config, random_weights(config, seed))


def at_once(policy, shapes):
    """The policy, to which all rounds take so little that a dispatch has as many as there may be."""
    for shape in shapes:
        policy._times.learn(shape, 1, (), 1e-6)
    return policy


def with_nan(arrays):
    return jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), arrays)


class Limited:
    """A policy whose dispatches have at most so many rounds."""

    def __init__(self, policy, most=math.inf):
        self.policy, self.most = policy, most

    def choose(self, *arguments):
        shape, rounds = self.policy.choose(*arguments)
        return shape, min(rounds, self.most)

    def observe(self, record):
        self.policy.observe(record)


class TinyEngine(Engine):
    """An engine without a thread, which a test steps, and which makes its requests."""

    def __init__(
        self,
        target,
        head=None,
        settings=PLAIN,
        *,
        proposer_weights=None,
        overlapped=None,
        prefill_tokens=None,
        live=(),
        least_nodes=16,
        snapshots=0,
        **plan,
    ):
        config, weights = (None, proposer_weights) if head is None else (head.config, head.weights)
        self.target, self.settings = target, settings
        plan = plan_engine(
            target.config,
            config,
            settings,
            target.dtype,
            live=live,
            least_nodes=least_nodes,
            snapshots=snapshots,
            **plan,
        )
        plan = dataclasses.replace(plan, size=dataclasses.replace(plan.size, prefill_tokens=prefill_tokens))
        super().__init__(plan, DecodeWeights(target.weights, weights), overlapped=overlapped)
        self._open()
        if isinstance(self.scheduler.policy, FixedBudget):
            at_once(self.scheduler.policy, self.plan.size.rounds(tuple(self.runner.decoders)))

    def request(self, prompt, params):
        asked = check_request(self.target, prompt, params, capacity=self.plan.size.capacity)
        [request] = asked.requests(self.settings, self.plan.decoder)
        return request

    def admit(self, request):
        request.arrival = time.monotonic()
        self._requests.append(request)
        self._take([request])
        return request

    def submit(self, prompt, params):
        return self.admit(self.request(prompt, params))

    @property
    def busy(self):
        return busy(self.scheduler)

    def launch(self, most_rounds=math.inf, decode=None):
        """Launches a batch, if there is room and something to do; whether it did."""
        if not self.scheduler.has_room:
            return False
        policy = self.scheduler.policy
        self.scheduler.policy = Limited(policy, most_rounds)
        batch = self.scheduler.next_batch()
        self.scheduler.policy = policy
        if batch is None:
            return False
        self.runner.launch(batch, decode, matchers=self.scheduler.matchers)
        return True

    def collect(self):
        return self._collect()

    def step(self, most_rounds=math.inf, decode=None):
        while self.launch(most_rounds, decode):
            pass
        return self._collect() if self.runner.in_flight else []


def busy(scheduler):
    """Whether any request waits or runs, except traced ones, which wait for a turn."""
    return any(not (each.traced and each.state is State.DECODING) for each in scheduler.requests)


def free_pages(scheduler):
    """Pages that are unused, or will be in the next batch; cached pages are unused."""
    return scheduler.size.num_pages - len({page for request in scheduler.requests for page in request.pages})


def free_slots(scheduler):
    """Slots that are free, or will be in the next batch."""
    taken = {request.slot for request in scheduler.requests}
    return [slot for slot in range(scheduler.size.slots) if slot not in taken]


def check_pool(pool, tables):
    """Every page is in one state, with exactly these block tables."""
    counts = Counter(page for pages in tables for page in pages)
    assert counts == Counter(pool._reference_counts), "reference counts"
    places = [*pool._free, *pool._reference_counts, *pool._cached]
    assert sorted(places) == list(range(pool.num_pages)), "every page is free, in use or cached"
    assert {key: page for page, key in pool._keys.items()} == pool._pages, "keys and pages"
    assert pool._cached.keys() <= pool._keys.keys(), "cached pages have a key"
    assert not pool._keys.keys() & set(pool._free), "pages with a key are not free"


def check_snapshots(snapshots):
    """Every place is free or has one key."""
    assert sorted([*snapshots._free, *snapshots._places.values()]) == list(range(snapshots.count)), "places"


def serve(engine, prompts, params):
    """Completions of requests that go through an engine together."""
    return served(engine, [engine.request(prompt, own) for prompt, own in zip(prompts, params, strict=True)])


def flat(outputs):
    """The completions of all prompts."""
    return [completion for output in outputs for completion in output.outputs]


def served(engine, requests):
    """Completions of requests that go through an engine together."""
    outputs = [Output(engine.admit(request), engine.target.tokenizer) for request in requests]
    while any(output.finish_reason is None for output in outputs):
        engine.step()
        for output in outputs:
            output.update()
            if output.finish_reason is not None:
                output.request.cancel()
    return [output.completion() for output in outputs]


def finish(engine):
    """Serves until the engine is idle, but not for ever: a lost page would keep a request waiting."""
    for _ in range(1000):
        if not (engine.busy or engine.runner.in_flight):
            return
        engine.step()
    raise AssertionError("the engine makes no progress")


def word_tokenizer(vocab_size):
    """A tokenizer whose words are the letters from "a" on, then two-letter words: texts are joined words."""
    words = [chr(ord("a") + i) for i in range(26)]
    words += [first + second for first in "xyz" for second in words[:26]]
    vocab = {word: i for i, word in enumerate(words[:vocab_size])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def letters_tokenizer():
    """A tokenizer of the letters from "a" on, and of the space as token 26; an empty text has no token."""
    vocab = {**{chr(ord("a") + i): i for i in range(26)}, " ": 26}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
