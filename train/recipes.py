"""Recipes: everything that a run depends on, in frozen records that are stored beside what they made."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fit:
    """One training run.

    Attributes:
        steps: Optimiser steps.
        batch: Sequences per step.
        window: Tokens per sequence.
        learning_rate: Peak; warmed up linearly, then a cosine to a tenth.
        warmup: Steps of warm-up.
        weight_decay: Of matrices; vectors are not decayed.
        clip: Largest global norm of the gradient.
        save_every: Steps between checkpoints.
        evaluate_every: Steps between evaluations on the validation split.
        log_every: Steps between writes of the log.
    """

    steps: int
    batch: int
    window: int
    learning_rate: float
    warmup: int
    weight_decay: float = 0.1
    clip: float = 1.0
    save_every: int = 500
    evaluate_every: int = 250
    log_every: int = 20


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder's layers; target and head share hidden size and heads."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


@dataclass(frozen=True)
class Polish:
    """Fine-tuning of the target against its own loops.

    Attributes:
        rounds: At most; each writes text and trains on it.
        sequences: Greedy texts per round.
        length: Tokens of a text, its prompt included.
        prompt: Shortest and longest prompt.
        ngram: Length of the runs that must not recur.
        times: How often a run may stand before it counts as a repeat.
        weight: Of the unlikelihood beside the likelihood of the corpus.
        fit: The training of a round; its batch counts greedy texts.
        slots: Texts written at a time.
    """

    rounds: int
    sequences: int
    length: int
    prompt: tuple[int, int]
    ngram: int
    times: int
    weight: float
    fit: Fit
    slots: int


@dataclass(frozen=True)
class Regeneration:
    """Text written by the target.

    Attributes:
        shards: Files, each finished whole.
        sequences: Per shard.
        length: Tokens of a sequence, its prompt included.
        prompt: Shortest and longest prompt.
        temperatures: Each sequence has one of these.
        slots: Sequences decoded at a time.
    """

    shards: int
    sequences: int
    length: int
    prompt: tuple[int, int]
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.8, 1.0)
    slots: int = 256


@dataclass(frozen=True)
class Distillation:
    """What the head learns and from which blocks.

    Attributes:
        block_size: Draft slots, the anchor's included.
        taps: Target layers that the head reads.
        anchors: Blocks per sequence and step.
        temperature: Of the distillation.
        gamma: Weights fall as exp(-depth / gamma); 0 is uniform.
        chunk: Rows of logits computed at a time.
    """

    block_size: int
    taps: tuple[int, ...]
    anchors: int
    temperature: float = 1.0
    gamma: float = 0.0
    chunk: int = 8192


@dataclass(frozen=True)
class Evaluation:
    """How a finished pair is measured on held-out modules.

    Attributes:
        stride: Tokens scored per window; the rest of the window is context only.
        prompts: Held-out prompts.
        prompt_tokens: Tokens of each.
        new_tokens: Tokens generated for each.
        budgets: Token-tree budgets, at the width below.
        width: Children per node.
        chain_budget: Budget of the width-1 chain.
        ngram: Length of the repeated runs that the repetition rate counts.
    """

    stride: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    budgets: tuple[int, ...] = (16, 32, 64, 128)
    width: int = 7
    chain_budget: int = 16
    ngram: int = 8


@dataclass(frozen=True)
class Recipe:
    """A target, its tokenizer and its draft head from a corpus."""

    name: str
    manifest: str
    library_repeats: int
    vocab_size: int
    context: int
    rope_theta: float
    target: Geometry
    target_fit: Fit
    polish: Polish
    regeneration: Regeneration
    head: Geometry
    head_fit: Fit
    distillation: Distillation
    evaluation: Evaluation
    seed: int = 0

    def manifest_path(self) -> Path:
        """Where the corpus is listed; a relative name means one that comes with this program."""
        return Path(__file__).parent / "corpora" / self.manifest


# 6.5 M and 3.0 M parameters: 19.2 MB together in bfloat16.
_TARGET = Geometry(layers=8, hidden=256, heads=4, kv_heads=2, head_dim=64, mlp=640)
_HEAD = Geometry(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, mlp=640)

DEMO = Recipe(
    name="demo",
    manifest="cpython-3.12.1.json",
    library_repeats=2,
    vocab_size=4096,
    context=2048,
    rope_theta=10_000.0,
    target=_TARGET,
    # 2,400 steps see the stream of 10.7 M tokens about seven times; more overfit.
    target_fit=Fit(steps=2400, batch=16, window=2048, learning_rate=2e-3, warmup=200),
    polish=Polish(
        rounds=12,
        sequences=1024,
        length=512,
        prompt=(8, 128),
        ngram=6,
        times=2,
        weight=0.5,
        fit=Fit(steps=100, batch=32, window=512, learning_rate=2e-4, warmup=10, evaluate_every=50),
        slots=512,
    ),
    # Greedy text counts twice: it is what most people look at first.
    regeneration=Regeneration(
        shards=16,
        sequences=1536,
        length=512,
        prompt=(8, 128),
        temperatures=(0.0, 0.0, 0.6, 1.0),
        slots=512,
    ),
    head=_HEAD,
    head_fit=Fit(steps=14000, batch=32, window=512, learning_rate=1e-3, warmup=200, weight_decay=0.01),
    # A path rarely gets past depth 6 here, so the near depths weigh most.
    distillation=Distillation(block_size=16, taps=(1, 3, 5, 7), anchors=64, gamma=4.0),
    evaluation=Evaluation(stride=512, prompts=64, prompt_tokens=64, new_tokens=256),
)

# The same pipeline at a size that a CPU runs in seconds; the caller brings the corpus.
TINY = Recipe(
    name="tiny",
    manifest="",
    library_repeats=1,
    vocab_size=300,
    context=128,
    rope_theta=10_000.0,
    target=Geometry(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48),
    target_fit=Fit(
        steps=30, batch=8, window=32, learning_rate=1e-2, warmup=5, save_every=10, evaluate_every=15,
        log_every=5,
    ),
    polish=Polish(
        rounds=1, sequences=16, length=40, prompt=(4, 8), ngram=4, times=1, weight=1.0,
        fit=Fit(steps=5, batch=4, window=40, learning_rate=3e-3, warmup=1, save_every=5, evaluate_every=5),
        slots=4,
    ),
    regeneration=Regeneration(shards=2, sequences=8, length=40, prompt=(4, 8), slots=4),
    head=Geometry(layers=1, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48),
    head_fit=Fit(
        steps=20, batch=4, window=40, learning_rate=5e-3, warmup=5, weight_decay=0.0, save_every=10,
        evaluate_every=10, log_every=5,
    ),
    distillation=Distillation(block_size=4, taps=(0, 1), anchors=6, chunk=24),
    evaluation=Evaluation(
        stride=16, prompts=3, prompt_tokens=8, new_tokens=16, budgets=(16,), width=3
    ),
)  # fmt: skip
