"""The recipe of a pair: every choice of ``python -m train pair``, and the rules that choose for a target.

`default_table` follows the table of docs/your-model.md. A recipe file replaces settings of it.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.config import ModelConfig, default_tap_layers
from jetspec_jax.device.memory import num_parameters
from train.head.recipe import Calibration, HeadRecipe
from train.head.recipe_file import PAIR_RECIPES, change, find_table, record_of
from train.loop.stages import dotted

#: The fewest prompts that a judgement and a calibration rest on.
LEAST_JUDGED, LEAST_CALIBRATED = 32, 8
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
        heldout: The approximate number of held-out prompts: for the judgement, for the calibration, and all
            others for the evaluations of the training.
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

    @property
    def choosing(self) -> int:
        """The fewest held-out prompts that the evaluations of the training need."""
        return max(1, self.head.evaluation.prompts, self.selector.evaluation.prompts)

    def check(self) -> None:
        """Raises ValueError that lists all settings that are out of range."""
        counts = ("most_prompts", "beginning_tokens", "max_tokens", "slots", "shard_documents")
        least = {name: (getattr(self, name), 1) for name in counts} | {
            "seed": (self.seed, 0),
            "heldout": (self.heldout, LEAST_JUDGED + LEAST_CALIBRATED + self.choosing),
            "judgement.prompts": (self.judgement.prompts, LEAST_JUDGED),
            "calibration.prompts": (self.calibration.prompts, LEAST_CALIBRATED),
        }
        wrong = [
            f"{name} must be at least {to}, not {value}" for name, (value, to) in least.items() if value < to
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


def default_table(
    target: Target, chosen: Mapping[str, Any], *, devices: int, gpu: bool, begun: bool
) -> dict[str, Any]:
    """The recipe that an expert would choose for a target, as a table.

    Args:
        target: The target.
        chosen: Settings that are chosen already. A window follows from the tokens of a prompt and its answer;
            batch, micro-batch, anchors and chunk follow from the window, and `paced` settings from the steps.
        devices: The number of devices that share a batch.
        gpu: Whether they are GPUs.
        begun: Whether training starts from an existing head.
    """
    table, config = find_table("default-pair")[1], target.config
    width, vocab = config.hidden_size, config.vocab_size
    layers, block, rank = next(size for least, size in SIZES.items() if width >= least)
    settings, given = dotted(chosen), bool(chosen.get("prompts"))

    def chosen_or(default: int, name: str) -> int:
        """The chosen number of a setting, or the default; a number that is refused later counts as none."""
        value = settings.get(name)
        return value if isinstance(value, int) and value > 0 else default

    taps = default_tap_layers(max(1, min(5, config.num_layers - 3)), config.num_layers)
    head = {"layers": layers, "block_size": block, "taps": taps, "mask_token": unused_token(target)}
    # The rates of the trained heads, 1e-3 at width 576 and 3e-4 at 4,096, and a power between them.
    rate = 1e-3 * min(1.0, (576 / width) ** 0.6) * (0.3 if begun else 1.0)
    # A step of the selector moves scores by the width and the root of the rank.
    selector_rate = 1.4 / (width * rank**0.5)
    of_target = {
        "head": {
            "head": {"start": "checkpoint"} if begun else head,
            "evaluation": {"budgets": [16, 64] if gpu else [8, 16]},
        },
        "selector": {"selector": {"rank": min(rank, vocab), "candidates": min(16, vocab)}},
        "judgement": {"budgets": [16, 64, 128] if gpu else [8, 16]},
        "slots": (256 if width < 2048 else 128) if gpu else 32,
    }
    prompt = chosen_or(Filters.max_tokens, "filters.max_tokens")
    # The template takes up to 64 tokens. Given prompts may be long.
    longest = prompt + chosen_or(PairRecipe.max_tokens, "max_tokens") + 64
    window = max(1 << (longest - 1).bit_length(), 2048 if given else 512)
    for name, peak in (("head", rate), ("selector", selector_rate)):
        window = chosen_or(window, f"{name}.window")  # the selector's is the head's
        # A batch has 16,384 tokens.
        batch = chosen_or(0, f"{name}.fit.batch")
        share = -(-(batch or max(2**14 // window, devices)) // devices)
        # A pass has 32 windows of 512 tokens at width 1,024, or another power of two.
        micro = 1 << (max(1, 2**24 // (max(width, 1024) * window)).bit_length() - 1)
        micro = min(share, chosen_or(micro, f"{name}.fit.micro_batch"))
        if batch:
            micro = math.gcd(share, micro)
        parts = -(-share // micro)
        chunk = min(1024, CHUNK_BYTES // (4 * micro * vocab)) // (block - 1) * (block - 1)
        known = table[name]["fit"]
        fit = {"batch": devices * parts * micro, "learning_rate": float(f"{peak:.2g}")}
        fit |= paced(chosen_or(known["steps"], f"{name}.fit.steps"), known["warmup"], known["log_every"])
        of_target[name] |= {
            "window": window,
            "remat": width >= 2048,
            "objective": {
                "anchors": max(1, anchors_for(config, block) * window // 512),
                "chunk": max(chunk, block - 1),
            },
            "fit": fit | ({"micro_batch": micro} if parts > 1 else {}),
        }
    _merge(table, of_target)
    if not has_chat_template(target) or (chosen.get("documents") and not given):
        table["writing"] = []  # a base model may have a template, and writes no prompts
    return table


def anchors_for(target: ModelConfig, block: int) -> int:
    """Anchors of 512 tokens, between 48 and 96.

    Within these limits the products with the output matrix, one for each of the target's tokens and two for
    each drafted row (its logits and their gradient), take as many operations as the target's layers.
    """
    matrix = target.hidden_size * target.vocab_size
    body = num_parameters(target) - matrix * (1 if target.tie_word_embeddings else 2)
    for layer in target.layers:
        if layer.experts is not None:  # of which a token reads some
            idle = layer.experts.count - layer.experts.routing.top_k
            body -= 3 * idle * layer.experts.size * target.hidden_size
    return max(48, min(96, 512 * (body - matrix) // (2 * (block - 1) * matrix)))


def default_writing() -> tuple[Writing, ...]:
    """The prompts that a target writes by default."""
    table = find_table("default-pair")[1]["writing"]
    return tuple(Writing(part["kind"], part["count"], tuple(part.get("phrases", ()))) for part in table)


def with_dropped_replaced(recipe: PairRecipe, kept: float) -> PairRecipe:
    """The recipe with as many more prompts to write as are dropped, at most four times the default numbers.

    Training sees each window about twenty times; with fewer prompts the head would learn them by heart. Other
    numbers than the default ones stay.
    """
    if recipe.writing != default_writing():
        return recipe
    more = tuple(replace(part, count=round(part.count / max(kept, 0.25))) for part in recipe.writing)
    return replace(recipe, writing=more)


def paced(steps: int, warmup: int, log_every: int) -> dict[str, int]:
    """Settings of a fit by its steps: six evaluations and saves; less warm-up and more logs if few."""
    every = -(-steps // 6)
    own = {"warmup": min(warmup, steps // 10), "log_every": min(log_every, max(1, every // 10))}
    return {"steps": steps, "save_every": every, "evaluate_every": every, **own}


def scaled(recipe: PairRecipe, factor: float) -> PairRecipe:
    """The recipe with so many times its prompts, answers and steps."""

    def of_steps(part: HeadRecipe) -> HeadRecipe:
        fit, steps = part.fit, max(20, round(factor * part.fit.steps))
        return replace(part, fit=replace(fit, **paced(steps, fit.warmup, fit.log_every)))

    least = 4 * recipe.heldout
    written = sum(part.count for part in recipe.writing)
    # Enough prompts remain to hold some out.
    share = max(factor, min(1.0, least / max(written, 1)))
    writing = tuple(replace(part, count=max(1, round(share * part.count))) for part in recipe.writing)
    return replace(
        recipe,
        head=of_steps(recipe.head),
        selector=of_steps(recipe.selector),
        writing=writing,
        share=min(share, 1.0) * recipe.share,
        most_prompts=max(round(factor * recipe.most_prompts), min(recipe.most_prompts, least)),
    )


def read_recipe(
    target: Target,
    path: str | Path | None,
    options: Mapping[str, Any],
    changes: Sequence[str],
    *,
    devices: int,
    gpu: bool,
    begun: bool,
) -> PairRecipe:
    """The default recipe with the settings of a file, of options, and of changes as ``head.fit.steps=100``.

    A file with whole recipes of the head and the selector replaces the default recipe.

    The keyword arguments are those of `default_table`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not TOML, a key is unknown, or a value has the wrong type.
    """
    given = {} if path is None else find_table(path, PAIR_RECIPES)[1]
    # Whole recipes of `python -m train head`, by their names or files.
    named = [name for name in ("head", "selector") if isinstance(given.get(name), str)]
    given |= {name: find_table(given[name])[1] for name in named}
    known = dotted(given)
    whole = all(f"{name}.fit.{key}" in known for name in ("head", "selector") for key in _REQUIRED)
    given |= {name: value for name, value in options.items() if value}
    chosen = copy.deepcopy(given)
    change(chosen, changes)
    # A recipe of both, such as that of a work folder, is read as it is: its None must not become a default.
    table = {} if whole else default_table(target, chosen, devices=devices, gpu=gpu, begun=begun)
    table |= {name: {} for name in named}
    _merge(table, given)
    change(table, changes)
    return record_of(PairRecipe, table, path or "the recipe")


# The settings of a `Fit` without a default.
_REQUIRED = ("steps", "batch", "learning_rate", "warmup")


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
