"""The recipe of a pair: every choice of ``python -m train pair``, and the rules that choose for a target.

`default_recipe` follows the table of docs/your-model.md. A recipe file replaces settings of it.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.config import default_tap_layers
from train.head.recipe import Calibration, HeadRecipe
from train.head.recipe_file import PAIR_RECIPES, change, find_table, record_of
from train.loop.fit import Fit

#: The fewest prompts that a judgement rests on.
LEAST_JUDGED = 32
#: Float32 bytes of a chunk of logits, of which a training step holds several at a time.
CHUNK_BYTES = 2 << 30


@dataclass(frozen=True)
class Writing:
    """Prompts that the target writes itself as a user, at temperature 1.

    Attributes:
        kind: Their name in counts.
        count: The number of prompts.
        phrases: First words for the target to continue, in turns; none lets it begin freely.
    """

    kind: str
    count: int
    phrases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Filters:
    """Limits on the prompts that the target writes.

    Attributes:
        max_tokens: Most tokens of a prompt; longer prompts do not end and are dropped.
        least_words: Fewest words of a prompt.
        ngram: Words of a run, for counting repetitions.
        times: The number of times that a run may occur in a prompt.
        least_kept: The least share of prompts that must pass; below it the command stops.
    """

    max_tokens: int = 192
    least_words: int = 4
    ngram: int = 4
    times: int = 2
    least_kept: float = 0.1


@dataclass(frozen=True)
class Judgement:
    """The measurements of the finished head on held-out prompts, one prompt at a time."""

    prompts: int = 64
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    budgets: tuple[int, ...] = (16, 64, 128)


@dataclass(frozen=True)
class PairRecipe:
    """Prompts, answers, training and judgement of a head.

    Attributes:
        head: The head and its training.
        selector: The selector and its training.
        writing: The prompts that the target writes.
        filters: The limits on these.
        prompts: Files and data sets of prompts, as of ``python -m train data``; SET or SET=FILE is the
            training split of a set of `train.data.prompt_sets`, asked in each of its forms.
        documents: Files, folders and data sets of texts, whose beginnings the target continues.
        weights: Shares of the sources: first of the prompts that the target writes, if it does, then of
            `prompts`, then of `documents`. None takes all of each.
        evaluated: Sets that training prompts must not overlap with, as SET or SET=FILE.
        share: Share of each source that is used.
        most_prompts: Most prompts that the target answers.
        beginning_tokens: Most tokens of a document's beginning.
        template_arguments: JSON object passed to the chat template.
        max_tokens: Most tokens of an answer.
        temperatures: Temperatures of the answers, in equal shares of each kind of prompts.
        heldout: The approximate number of held-out prompts: for the evaluations of the training, for the
            calibration, and for the judgement.
        slots: Texts generated at a time.
        shard_documents: Most texts of a shard, after which a run can stop.
        seed: Seed of the sampling and of all choices.
    """

    head: HeadRecipe
    selector: HeadRecipe
    writing: tuple[Writing, ...] = ()
    filters: Filters = field(default_factory=Filters)
    prompts: tuple[str, ...] = ()
    documents: tuple[str, ...] = ()
    weights: tuple[float, ...] | None = None
    evaluated: tuple[str, ...] = ()
    share: float = 1.0
    most_prompts: int = 40_000
    beginning_tokens: int = 64
    template_arguments: str = "{}"
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 1.0)
    heldout: int = 256
    slots: int = 256
    shard_documents: int = 1024
    calibration: Calibration = field(default_factory=Calibration)
    judgement: Judgement = field(default_factory=Judgement)
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError that lists all settings that are out of range."""
        counts = ("most_prompts", "beginning_tokens", "max_tokens", "slots", "shard_documents")
        least = {**dict.fromkeys(counts, 1), "seed": 0}
        wrong = [
            f"{name} must be at least {to}, not {getattr(self, name)}"
            for name, to in least.items()
            if getattr(self, name) < to
        ]
        if not 0 < self.share <= 1:
            wrong.append(f"share must be above 0 and at most 1, not {self.share}")
        if not (self.writing or self.prompts or self.documents):
            wrong.append("there are no prompts: set writing, prompts or documents")
        wrong += [
            f"{name} must name at least one"
            for name, values in (
                ("temperatures", self.temperatures),
                ("judgement.budgets", self.judgement.budgets),
                ("judgement.temperatures", self.judgement.temperatures),
            )
            if not values
        ]
        wrong += self.calibration.check()
        need = self.head.evaluation.prompts + self.calibration.prompts + LEAST_JUDGED
        if self.heldout < need:
            wrong.append(
                f"heldout must be at least {need}: the head's evaluation.prompts, calibration.prompts and "
                f"{LEAST_JUDGED} to judge, not {self.heldout}"
            )
        for name, recipe in (("head", self.head), ("selector", self.selector)):
            try:
                recipe.check()
            except ValueError as error:
                wrong.append(f"{name}: {error}")
        if self.head.calibration or self.selector.calibration:
            # They would take held-out prompts that are judged.
            wrong.append("head.calibration and selector.calibration must be left out: set calibration")
        if self.selector.selector is None:
            wrong.append("selector.selector is missing: the selector's rank")
        if wrong:
            raise ValueError("; ".join(wrong))


#: Layers, block size and selector's rank of a head, by the least width of its target.
SIZES = {2048: (5, 16, 256), 1024: (4, 16, 128), 0: (3, 12, 64)}


def default_table(target: Target, *, devices: int, gpu: bool, given: bool, begun: bool) -> dict[str, Any]:
    """The recipe that an expert would choose for a target, as a table.

    Args:
        target: The target.
        devices: The number of devices that share a batch.
        gpu: Whether they are GPUs.
        given: Whether there are the user's own prompts or documents, which may be long.
        begun: Whether training starts from an existing head.
    """
    table, config = find_table("default-pair")[1], target.config
    width, vocab = config.hidden_size, config.vocab_size
    layers, block, rank = next(size for least, size in SIZES.items() if width >= least)
    # A batch has 16,384 tokens, and an anchor for each five of them.
    window = 2048 if given else 512
    share = -(-max(16_384 // window, devices) // devices)
    micro = min(share, max(1, 2 ** int(math.log2(32 * 1024 / max(width, 1024) * 512 / window))))
    parts = -(-share // micro)
    chunk = min(1024, CHUNK_BYTES // (4 * micro * vocab)) // (block - 1) * (block - 1)
    common = {
        "window": window,
        "remat": width >= 2048,
        "objective": {"anchors": 96 * window // 512, "chunk": max(chunk, block - 1)},
        "fit": {"batch": devices * parts * micro, **({"micro_batch": micro} if parts > 1 else {})},
    }
    taps = default_tap_layers(max(1, min(5, config.num_layers - 3)), config.num_layers)
    head = {"layers": layers, "block_size": block, "taps": taps, "mask_token": unused_token(target)}
    # The rates of the trained heads, 1e-3 at width 576 and 3e-4 at 4,096, and a power between them.
    rate = 1e-3 * min(1.0, (576 / width) ** 0.6) * (0.3 if begun else 1.0)
    # A step of the selector moves scores by the width and the root of the rank.
    of_selector = {"rank": min(rank, vocab), "candidates": min(16, vocab)}
    own = {
        "head": {"head": {"start": "checkpoint"} if begun else head, "fit": {"learning_rate": rate}},
        "selector": {"selector": of_selector, "fit": {"learning_rate": 1.4 / (width * rank**0.5)}},
        "judgement": {"budgets": [16, 64, 128] if gpu else [8, 16]},
        "slots": (256 if width < 2048 else 128) if gpu else 32,
    }
    for name in ("head", "selector"):
        _merge(own[name], common)
        own[name]["fit"]["learning_rate"] = float(f"{own[name]['fit']['learning_rate']:.2g}")
    _merge(table, own)
    return table if has_chat_template(target) else {**table, "writing": []}


def with_steps(recipe: PairRecipe, head: int, selector: int) -> PairRecipe:
    """The recipe with other numbers of steps, evaluated and saved six times."""

    def fitted(fit: Fit, steps: int) -> Fit:
        every = max(1, -(-steps // 6))
        warmup = min(fit.warmup, steps // 10)
        return replace(fit, steps=steps, warmup=warmup, save_every=every, evaluate_every=every)

    return replace(
        recipe,
        head=replace(recipe.head, fit=fitted(recipe.head.fit, head)),
        selector=replace(recipe.selector, fit=fitted(recipe.selector.fit, selector)),
    )


def scaled(recipe: PairRecipe, factor: float) -> PairRecipe:
    """The recipe with so many times its prompts, answers and steps."""
    steps = [max(20, round(factor * part.fit.steps)) for part in (recipe.head, recipe.selector)]
    least = 4 * recipe.heldout
    written = sum(part.count for part in recipe.writing)
    # Enough prompts remain to hold some out.
    share = max(factor, min(1.0, least / max(written, 1)))
    writing = tuple(replace(part, count=max(1, round(share * part.count))) for part in recipe.writing)
    return replace(
        with_steps(recipe, *steps),
        writing=writing,
        share=min(share, 1.0) * recipe.share,
        most_prompts=max(round(factor * recipe.most_prompts), least),
    )


def read_recipe(
    default: Mapping[str, Any], path: str | Path | None, options: Mapping[str, Any], changes: Sequence[str]
) -> PairRecipe:
    """The default recipe with the settings of a file, of options, and of changes as ``head.fit.steps=100``.

    A file with whole recipes of the head and the selector replaces the default recipe.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not TOML, a key is unknown, or a value has the wrong type.
    """
    table = copy.deepcopy(dict(default))
    given = {} if path is None else find_table(path, PAIR_RECIPES)[1]
    for name in ("head", "selector"):
        # A whole recipe of `python -m train head`, by its name or file.
        if isinstance(other := given.get(name), str):
            given[name] = table[name] = find_table(other)[1]
    if all(given.get(name, {}).get("fit", {}).keys() >= _REQUIRED for name in ("head", "selector")):
        table = {}  # A recipe of both, such as that of a work folder: its None must not become a default.
    _merge(table, given)
    table |= {name: value for name, value in options.items() if value}
    change(table, changes)
    return record_of(PairRecipe, table, path or "the recipe")


# The settings of a `Fit` without a default.
_REQUIRED = {"steps", "batch", "learning_rate", "warmup"}


def plain(recipe: PairRecipe) -> dict[str, Any]:
    """The recipe as nested tables without None, as a TOML file has it."""
    return _without_none(asdict(recipe))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list | tuple) else value


def _merge(table: dict[str, Any], other: Mapping[str, Any]) -> None:
    for name, value in other.items():
        if isinstance(value, dict) and isinstance(table.get(name), dict):
            _merge(table[name], value)
        else:
            table[name] = copy.deepcopy(value)  # several tables may share it


def has_chat_template(target: Target) -> bool:
    """Whether conversations can be rendered for a target."""
    return bool(target.tokenizer is not None and target.tokenizer.chat_template)


def unused_token(target: Target) -> str | int | None:
    """A mask token that texts never hold.

    None means the tokenizer's. Otherwise it is a row of the embedding without a token, or a special token
    that neither ends a turn nor is in the chat template. If there is none, it is None too.
    """
    tokenizer, vocab = target.tokenizer, target.config.vocab_size
    known = {} if tokenizer is None else tokenizer.get_vocab()
    if tokenizer is None or tokenizer.mask_token in known:
        return None
    free = set(range(vocab)) - set(known.values())
    template = str(tokenizer.chat_template or "")
    used = {*target.eos_token_ids, *(tokenizer.convert_tokens_to_ids(text) for text in _named(tokenizer))}
    special = [
        id
        for id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and id < vocab and id not in used and token.content not in template
    ]
    return min(free or special, default=None)


def _named(tokenizer: Any) -> list[str]:
    return [token for token in (tokenizer.bos_token, tokenizer.unk_token, tokenizer.pad_token) if token]
