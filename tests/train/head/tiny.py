"""A tiny pair, documents and a recipe, shared by the tests of the draft head's training."""

import dataclasses
import json

import numpy as np

from jetspec_jax.config import Experts
from pallas_kernels.expert_choice import RouterRule
from tests.decode.tiny import TINY
from tests.train import folders
from train.data.records import Document
from train.head.recipe import HeadEvaluation, HeadRecipe, HeadSettings
from train.loop.fit import Fit
from train.loss.objectives import Objective

MASK = TINY.vocab_size - 1
RECIPE = HeadRecipe(
    Fit(
        steps=4,
        batch=8,
        learning_rate=1e-2,
        warmup=1,
        save_every=2,
        evaluate_every=2,
        log_every=1,
    ),
    window=16,
    head=HeadSettings(layers=1, block_size=4, taps=(0, 1), mask_token=MASK),
    objective=Objective(anchors=4, chunk=8),
    # Decoding takes long to compile: most runs are judged by their validation loss alone.
    evaluation=HeadEvaluation(windows=12, prompts=0, prompt_tokens=4, new_tokens=6, budgets=(16,)),
    deterministic=True,
    dtype="float32",
)


#: The same target with experts in place of its dense blocks.
MIXTURE = dataclasses.replace(
    TINY,
    model_type="qwen3_moe",
    layers=tuple(
        dataclasses.replace(layer, mlp_size=0, experts=Experts(4, 24, RouterRule(2, renormalise=True)))
        for layer in TINY.layers
    ),
)


def changed(recipe, **changes):
    """A recipe with some of its records' attributes replaced, given as ``fit={"steps": 3}``."""
    for name, value in changes.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(recipe, name), **value)
        recipe = dataclasses.replace(recipe, **{name: value})
    return recipe


def write_documents(folder, vocab_size=TINY.vocab_size, count=40):
    """Documents of random tokens, each of them after the first six to be learnt."""
    rng = np.random.default_rng(0)
    documents = []
    for _ in range(count):
        tokens = rng.integers(0, vocab_size - 1, rng.integers(10, 30)).astype(np.int32)
        documents.append(Document(tokens, np.arange(len(tokens)) >= 6))
    return write(folder, documents, vocab_size)


def write(folder, documents, vocab_size):
    changes = {"vocab_size": vocab_size, "heldout": len(documents) // 4, "shard_documents": 16}
    folders.write(folder, documents, **changes)
    return folder


def records(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    measured = ("seconds", "memory_gib")
    return [
        {k: v for k, v in line.items() if k not in measured and not k.endswith("_per_second")}
        for line in lines
    ]


def losses(folder):
    return [record["loss"] for record in records(folder) if "loss" in record]
