"""What a pair costs: a trial of each kind of work, estimates by stage, and recipes that fit a time.

The trial is real work of a few seconds at the sizes of the recipe, so that it also shows whether a device's
memory holds it, and whether the target writes prompts.
"""

import math
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jetspec_jax import SamplingParams, Target, generate
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.device.memory import DeviceMemoryError, num_parameters
from train.data.documents import Documents, Writer
from train.data.given import write_given
from train.data.mixing import mix_counts
from train.data.records import Document
from train.data.regenerate import Prompts, regenerate, regeneration_settings
from train.head.recipe import HeadRecipe
from train.head.training import train_head
from train.loop.log import read_log
from train.loop.stages import Deadline, fresh
from train.pair.recipe import PairRecipe, scaled

#: Steps of the trial's training, of which the first compile.
_STEPS = 8
#: The most tokens of a trial's text.
_TRIAL_TOKENS = 64
# Steps of the head's training that take as long as one of the selector's, and as the fit of the draft scales.
# On an H200: about 1, and 1,140 with SmolLM2 and 750 with Qwen2.5-Coder-0.5B.
_SELECTOR_STEP, _FIT = 1.0, 900
# Seconds of a trial after which it is not repeated.
_SLOW = 60.0
#: Mean tokens of an answer and of a written prompt, as shares of their limits.
_ANSWER, _WRITTEN = 0.75, 0.5
#: Bytes of a checkpoint per parameter of the head: float32 weights and two moments.
_STATE = 12
#: Floating-point operations per second of a CPU's core, for targets that are too large for a trial.
_CORE = 2e10
#: Hours on a CPU that need consent.
MOST_HOURS = 3.0


class Rates(NamedTuple):
    """Measured speeds.

    Attributes:
        tokens: Tokens per second of many texts together.
        alone: Tokens per second of one text.
        step: Seconds of a step of the head's training.
        begun: Seconds to compile and begin, of each of the three.
        kept: Share of the written prompts that are kept.
    """

    tokens: float
    alone: float
    step: float
    begun: float
    kept: float = 1.0


class Cost(NamedTuple):
    """Estimates: minutes by stage, and bytes on the disk."""

    minutes: dict[str, float]
    disk: int

    def lines(self) -> list[str]:
        """A line per stage, and one for all."""
        shown = [f"  {name}: about {duration(minutes)}" for name, minutes in self.minutes.items()]
        total = duration(sum(self.minutes.values()))
        return [*shown, f"  in all about {total}, and {self.disk / 2**30:.1f} GiB on the disk"]


def duration(minutes: float) -> str:
    """Minutes or hours, for people."""
    return f"{minutes / 60:.1f} hours" if minutes >= 120 else f"{max(minutes, 0.1):.1f} minutes"


def rough_hours(config: ModelConfig, recipe: PairRecipe, given: Sequence[int]) -> float:
    """Hours on this machine's CPU, from the target's operations alone; ``given`` as for `answered`."""
    fit = recipe.head.fit
    answers = answered(recipe, given) * recipe.max_tokens * _ANSWER
    tokens = answers + _written(recipe) + 3 * fit.steps * fit.batch * recipe.head.window
    return 2 * num_parameters(config) * tokens / (_CORE * (os.cpu_count() or 1)) / 3600


def answered(recipe: PairRecipe, given: Sequence[int], kept: float = 1.0) -> int:
    """The number of prompts to answer, of ``given`` ones by source and the ``kept`` share of written ones.

    Raises:
        ValueError: The recipe's weights do not suit the sources.
    """
    sizes = [max(1, round(recipe.share * size)) for size in given]
    if recipe.writing:
        sizes.insert(0, max(1, round(kept * sum(part.count for part in recipe.writing))))
    return min(recipe.most_prompts, sum(mix_counts(sizes, recipe.weights)))


def _written(recipe: PairRecipe) -> float:
    return sum(part.count for part in recipe.writing) * recipe.filters.max_tokens * _WRITTEN


def trial_texts(
    folder: Path, target: Target, prompts: Prompts, recipe: PairRecipe
) -> tuple[Documents, float]:
    """The target's continuations of some prompts, and tokens per second.

    Raises:
        DeviceMemoryError: The device cannot hold so many texts.
    """
    settings = regeneration_settings(
        prompts,
        target="trial",
        vocab_size=target.config.vocab_size,
        dtype=str(target.dtype),
        seed=(recipe.seed,),
        source="trial",
        heldout=0,
        shard_documents=len(prompts.tokens),
    )
    seconds = 0.0
    for _ in range(2):  # the first compiles, which matters on a fast device
        begun = time.perf_counter()
        writer = Writer(fresh(folder), settings, ())
        try:
            regenerate(writer, target, prompts, slots=recipe.slots, deadline=Deadline())
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{error}; here max_slots is the setting slots") from error
        seconds = time.perf_counter() - begun
        if seconds > _SLOW:
            break
    found = Documents.open(folder)
    return found, sum(int(document.learn.sum()) for document in found) / seconds


def trial_rates(
    folder: Path,
    target: Target,
    texts: Documents,
    tokens: float,
    recipe: PairRecipe,
    checkpoint: Source | None,
) -> Rates:
    """The speeds of decoding alone and of training on the trial's texts, beside ``tokens`` a second of many.

    Raises:
        ValueError: A training step does not fit the memory of the device.
    """
    begun = time.perf_counter()
    prompt, params = texts[0].tokens[:8].tolist(), SamplingParams(max_tokens=_TRIAL_TOKENS, ignore_eos=True)
    seconds = 0.0
    for _ in range(2):
        at = time.perf_counter()
        generate(target, [prompt], params, max_slots=1)
        seconds = time.perf_counter() - at
    data, work = folder / "documents", folder / "head"
    part = recipe.head
    fit = replace(part.fit, steps=_STEPS, warmup=0, save_every=_STEPS, evaluate_every=_STEPS, log_every=1)
    all_tokens = np.concatenate([document.tokens for document in texts])
    shape = (part.fit.batch + 1, part.window)
    learn = np.ones(part.window, bool)
    documents = [Document(row, learn) for row in np.resize(all_tokens, shape).astype(np.int32)]
    write_given(
        fresh(data),
        documents,
        target="trial",
        vocab_size=target.config.vocab_size,
        source="trial",
        held=[0],
        shard_documents=len(documents),
        deadline=Deadline(),
    )
    trial = replace(part, fit=fit, evaluation=replace(part.evaluation, windows=1, prompts=0))
    try:
        train_head(fresh(work), trial, target, data, Deadline(), checkpoint=checkpoint, label="trial")
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"a training step of {part.fit.batch} windows of {part.window} tokens does not fit the memory of "
            "the device: set head.fit.micro_batch and selector.fit.micro_batch lower, or objective.chunk"
        ) from error
    steps = [record["seconds"] for record in read_log(work / "log.jsonl") if "loss" in record]
    step = statistics.median(steps[_STEPS // 2 :])
    whole = time.perf_counter() - begun
    return Rates(tokens, _TRIAL_TOKENS / seconds, step, whole - _STEPS * step)


def cost_of(recipe: PairRecipe, rates: Rates, head: DraftHeadConfig, given: Sequence[int]) -> Cost:
    """Estimates by stage, and the bytes that the folder will have; ``head`` is without its selector."""
    judge, fit = recipe.judgement, recipe.calibration
    judged = len(judge.temperatures) * judge.prompts * judge.max_tokens * _ANSWER
    calibrated = len(fit.temperatures) * fit.prompts * fit.max_tokens
    count, begin = answered(recipe, given, rates.kept), rates.begun / 3
    answers = count * recipe.max_tokens * _ANSWER
    seconds = {
        "prompts": _written(recipe) / rates.tokens,
        "answers": answers / rates.tokens + begin,
        "head": recipe.head.fit.steps * rates.step + 3 * begin + _evaluating(recipe.head, rates),
        "selector": recipe.selector.fit.steps * _SELECTOR_STEP * rates.step
        + 2 * begin
        + _evaluating(recipe.selector, rates),
        "calibrate": calibrated / rates.tokens + _FIT * rates.step + 2 * begin,
        # Plainly, and with the trees of each budget, about twice as fast.
        "judge": judged * (1 + len(judge.budgets) / 2) / rates.alone + (1 + len(judge.budgets)) * begin,
    }
    rank = 0 if recipe.selector.selector is None else recipe.selector.selector.rank
    parameters = num_parameters(head) + rank * (2 * head.layers.vocab_size + head.layers.hidden_size)
    tokens = answers + _written(recipe) + count * recipe.filters.max_tokens
    disk = round(5 * tokens + parameters * (2 * _STATE + 2 * 4 + 4 * 2) + 2**26)
    return Cost({name: value / 60 for name, value in seconds.items()}, disk)


def _evaluating(part: HeadRecipe, rates: Rates) -> float:
    """Seconds of a training's evaluations: a tree's rows take as long as tokens of many texts together."""
    evaluation, times = part.evaluation, -(-part.fit.steps // part.fit.evaluate_every)
    # A round commits two tokens or more.
    rounds = evaluation.prompts * evaluation.new_tokens * len(evaluation.temperatures) / 2
    return times * rounds * sum(evaluation.budgets) / rates.tokens


def fitted(
    recipe: PairRecipe,
    rates: Rates,
    head: DraftHeadConfig,
    given: Sequence[int],
    minutes: float,
    spent: float,
) -> PairRecipe:
    """The recipe scaled so that its stages take so many minutes, of which some are spent.

    The other arguments are those of `cost_of`.

    Raises:
        ValueError: The time is too short even for the smallest recipe.
    """

    def minutes_of(factor: float) -> float:
        return sum(cost_of(scaled(recipe, factor), rates, head, given).minutes.values())

    low, high = 0.0, 8.0
    if spent + (least := minutes_of(low)) > minutes:
        raise ValueError(
            f"{minutes:g} minutes are too few: this check took {spent:.1f}, and the smallest recipe takes "
            f"about {math.ceil(least)} more on this device; give --total-minutes {math.ceil(spent + least)}"
        )
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if spent + minutes_of(middle) <= minutes else (low, middle)
    return scaled(recipe, low)


def check_disk(folder: Path, need: int) -> None:
    """Raises OSError if a folder's disk has fewer free bytes than needed."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(
            f"{folder} has {free / 2**30:.1f} GiB free, and about {need / 2**30:.1f} GiB are needed; name a "
            "folder on another disk, or a shorter --total-minutes"
        )
