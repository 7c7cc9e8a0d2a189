"""The recipe of the demo pair: a tokenizer, a target, its text and its draft head."""

from dataclasses import dataclass
from pathlib import Path

from train.head.recipe import HeadEvaluation, HeadRecipe, HeadSettings
from train.head.recipe_file import read_head_recipe
from train.loop.fit import Fit
from train.loss.objectives import Objective


@dataclass(frozen=True)
class Geometry:
    """Sizes of a decoder's layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


@dataclass(frozen=True)
class Polish:
    """Fine-tuning of the target against its own repetition.

    Attributes:
        rounds: Most rounds; each generates text and trains on it.
        sequences: Greedy texts per round.
        length: Tokens of a text, its prompt included.
        prompt: Shortest and longest prompt.
        ngram: Length of the runs that must not recur.
        times: How often a run may occur before it counts as a repeat.
        weight: Weight of the unlikelihood; that of the corpus's likelihood is 1.
        fit: The training of a round; its batch counts greedy texts.
        slots: Texts generated at a time.
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
    """Text that the target generates for its head.

    Attributes:
        shards: Number of shards.
        sequences: Sequences per shard.
        length: Tokens of a sequence, its prompt included.
        prompt: Shortest and longest prompt.
        temperatures: Each sequence has one of these.
        slots: Sequences generated at a time.
        heldout: Most sequences that are held out.
    """

    shards: int
    sequences: int
    length: int
    prompt: tuple[int, int]
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.8, 1.0)
    slots: int = 256
    heldout: int = 256

    def held(self, count: int) -> int:
        """How many of ``count`` sequences are held out: at most an eighth."""
        return min(self.heldout, count // 8)


@dataclass(frozen=True)
class PairEvaluation:
    """The evaluation of a finished pair on held-out modules.

    Attributes:
        stride: Tokens scored per window; the rest of the window is context only.
        prompts: Held-out prompts.
        kept_prompts: Prompts that are written beside the pair: those measured, then more of the same kind.
        prompt_tokens: Tokens of a prompt.
        new_tokens: Tokens generated for each prompt.
        budgets: Token-tree budgets, at the width below.
        width: Children per node.
        chain_budget: Budget of the trees of width 1.
        ngram: Length of the repeated runs that the repetition rate counts.
    """

    stride: int
    prompts: int
    kept_prompts: int
    prompt_tokens: int
    new_tokens: int
    budgets: tuple[int, ...] = (16, 32, 64, 128)
    width: int = 7
    chain_budget: int = 16
    ngram: int = 8


@dataclass(frozen=True)
class PairRecipe:
    """A target, its tokenizer and its draft head from a corpus."""

    name: str
    manifest: str
    library_repeats: int
    vocab_size: int
    context: int
    rope_theta: float
    target: Geometry
    target_window: int
    target_fit: Fit
    polish: Polish
    regeneration: Regeneration
    head: HeadRecipe
    evaluation: PairEvaluation
    seed: int = 0

    def manifest_path(self) -> Path:
        """The file that lists the corpus; a relative name is one in ``corpora/``."""
        return Path(__file__).parent / "corpora" / self.manifest


DEMO = PairRecipe(
    name="demo",
    manifest="cpython-3.12.1.json",
    library_repeats=2,
    vocab_size=4096,
    context=2048,
    rope_theta=10_000.0,
    # 6.5 M parameters; the head has 3.0 M: 19.2 MB together in bfloat16.
    target=Geometry(layers=8, hidden=256, heads=4, kv_heads=2, head_dim=64, mlp=640),
    target_window=2048,
    # 2,400 steps see the stream of 10.7 M tokens about seven times; more overfit.
    target_fit=Fit(steps=2400, batch=16, learning_rate=2e-3, warmup=200),
    polish=Polish(
        rounds=12,
        sequences=1024,
        length=512,
        prompt=(8, 128),
        ngram=6,
        times=2,
        weight=0.5,
        fit=Fit(steps=100, batch=32, learning_rate=2e-4, warmup=10, evaluate_every=50),
        slots=512,
    ),
    # Greedy text counts twice, because most people look at it first.
    regeneration=Regeneration(
        shards=16,
        sequences=1536,
        length=512,
        prompt=(8, 128),
        temperatures=(0.0, 0.0, 0.6, 1.0),
        slots=512,
    ),
    head=read_head_recipe("demo"),
    evaluation=PairEvaluation(stride=512, prompts=64, kept_prompts=500, prompt_tokens=64, new_tokens=256),
)

# The same recipe at a size that a CPU runs in seconds; the caller sets the manifest.
TINY = PairRecipe(
    name="tiny",
    manifest="",
    library_repeats=1,
    vocab_size=300,
    context=128,
    rope_theta=10_000.0,
    target=Geometry(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, mlp=48),
    target_window=32,
    target_fit=Fit(
        steps=30, batch=8, learning_rate=1e-2, warmup=5, save_every=10, evaluate_every=15,
        log_every=5,
    ),
    polish=Polish(
        rounds=1, sequences=16, length=40, prompt=(4, 8), ngram=4, times=1, weight=1.0,
        fit=Fit(steps=5, batch=4, learning_rate=3e-3, warmup=1, save_every=5, evaluate_every=5),
        slots=4,
    ),
    regeneration=Regeneration(shards=2, sequences=8, length=40, prompt=(4, 8), slots=4),
    head=HeadRecipe(
        Fit(
            steps=20, batch=4, learning_rate=5e-3, warmup=5, weight_decay=0.0, save_every=10,
            evaluate_every=10, log_every=5,
        ),
        window=40,
        head=HeadSettings(layers=1, block_size=4, taps=(0, 1)),
        objective=Objective(anchors=6, chunk=24),
        evaluation=HeadEvaluation(
            windows=8, prompts=2, prompt_tokens=8, new_tokens=16, budgets=(16,), width=3
        ),
    ),
    evaluation=PairEvaluation(
        stride=16, prompts=2, kept_prompts=5, prompt_tokens=8, new_tokens=16, budgets=(16,), width=3
    ),
)  # fmt: skip
