"""The stages of a pair, and the options of a work folder."""

import contextlib
import functools
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetspec_jax.checkpoint.content import SMALL_PATTERNS
from jetspec_jax.checkpoint.files import write_json, write_text
from jetspec_jax.checkpoint.hub import resolve
from jetspec_jax.checkpoint.loading import Head, Target, read_draft_head, read_target
from jetspec_jax.checkpoint.pairs import draft_head_at
from jetspec_jax.checkpoint.source import Source, resolve_dtype
from jetspec_jax.config import DraftHeadConfig, check_head_fits, parse_draft_head_config, read_json
from jetspec_jax.sampling.params import SamplingParams
from train.data.documents import Documents, Writer
from train.data.prompt_filters import RUN, Evaluated, UserPrompt, without_overlap
from train.data.prompts import read_rows
from train.data.regenerate import Prompts, regenerate, regeneration_settings
from train.data.rendering import Encoder
from train.head.calibrate import calibrate
from train.head.config import head_json, mask_token_id
from train.head.evaluation import evaluation_trees
from train.head.export import export_head
from train.head.recipe import HeadRecipe
from train.head.recipe_file import find_table, record_of, toml_of
from train.head.training import fingerprint, train_head
from train.head.verdict import read_verdict
from train.loop.stages import DONE, Deadline, Stage, claim, fresh, run_stages
from train.pair.card import WITHOUT_SELECTOR, card_of, licence_of
from train.pair.cost import (
    MOST_HOURS,
    Rates,
    answered,
    check_disk,
    cost_of,
    duration,
    fitted,
    rough_hours,
    trial_rates,
    trial_texts,
)
from train.pair.judge import Split, draw_judgement, judgement_of, measure, split_prompts, table_of
from train.pair.prompts import (
    beginnings,
    drop_words,
    evaluated_runs,
    mixed,
    read_sources,
    read_written,
    to_write,
)
from train.pair.recipe import PairRecipe, has_chat_template, read_recipe, with_dropped_replaced

#: Files of the work folder: its options, its recipe, its estimates, and the use of held-out prompts.
CLAIM, RECIPE, ESTIMATE, HELD = "pair.json", "recipe.toml", "estimate.json", "held.json"
#: The folder of a given head without its selector.
BEGINNING = "beginning"
#: The target's files that may name its licence.
CARD_PATTERNS = (*SMALL_PATTERNS, "README.md", "LICENSE*")


@dataclass(frozen=True)
class Options:
    """The command's options.

    Attributes:
        changes: Settings that replace those of the recipe file.
        settings: Settings of the recipe that have options of their name.
    """

    target: str
    work: Path
    draft_head: str | None = None
    recipe: Path | None = None
    changes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    total_minutes: float | None = None
    yes: bool = False
    ignore_config_keys: tuple[str, ...] = ()

    @property
    def source(self) -> Source:
        """The target."""
        return Source(self.target, ignore_config_keys=self.ignore_config_keys)

    @property
    def name(self) -> str:
        """The target's name, without the folders of a machine."""
        path = Path(self.target).expanduser()
        return path.resolve().name if path.exists() else self.target

    def claimed(self) -> dict[str, Any]:
        """All that a work folder keeps to."""
        return {
            "target": self.name,
            "target_config": asdict(self.source.target_config),
            "draft_head": self.draft_head,
            "recipe": None if self.recipe is None else find_table(self.recipe)[1],
            "set": self.changes,
            "options": self.settings,
            "total_minutes": self.total_minutes,
        }


def make_pair(options: Options, minutes: float | None = None) -> Path:
    """Runs the stages that are not done; returns the folder of the finished head.

    Args:
        minutes: Time after which the run saves and stops.

    Raises:
        OutOfTime: The limit was reached; the same call resumes.
        FileNotFoundError: The target, the recipe or a set cannot be found.
        ValueError: The folder has another target or other options, the target does not write prompts, a
            setting is out of range, or too few prompts are left to judge.
        DeviceMemoryError: The device cannot hold the target.
        OSError: The disk is full, or lacks the room for what will be made.
    """
    for name, value in (("--total-minutes", options.total_minutes), ("--minutes", minutes)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, not {value}")
    # Stages remove their leftovers, so the folder must not be another program's.
    own = any((options.work / name).exists() for name in (CLAIM, DONE))
    if not own and options.work.exists() and any(options.work.iterdir()):
        raise ValueError(f"{options.work} is not empty, and no work folder of this command; name another one")
    made = _Pair(options, Deadline(minutes))
    if (options.work / CLAIM).exists():
        made.claim()
    stages = {
        "check": made.check_stage,
        "prompts": made.prompts_stage,
        "answers": made.answers_stage,
        "head": made.head_stage,
        "selector": made.selector_stage,
        "calibrate": made.calibrate_stage,
        "judge": made.judge_stage,
        "export": made.export_stage,
    }
    shown = {name: made.with_estimate(name, stage) for name, stage in stages.items()}
    run_stages(options.work, shown, made.deadline)
    return options.work / "export"


class _Pair:
    """The stages and their shared state, which is loaded on first use."""

    def __init__(self, options: Options, deadline: Deadline):
        self.options, self.work, self.deadline = options, options.work, deadline
        self.dropped = Counter[tuple[str, str]]()  # by kind and reason

    def with_estimate(self, name: str, stage: Stage) -> Stage:
        """A stage that begins with its estimate."""

        def run() -> None:
            path = self.work / ESTIMATE
            if path.exists() and name in (minutes := read_json(path)):
                print(f"  about {duration(minutes[name])}", flush=True)
            stage()

        return run

    @functools.cached_property
    def recipe(self) -> PairRecipe:
        """The recipe that the check wrote."""
        path, table = find_table(self.work / RECIPE)
        return record_of(PairRecipe, table, path)

    @functools.cached_property
    def target(self) -> Target:
        """The target, on one device, in the dtype of the recipe if there is one."""
        source = self.options.source
        if "recipe" in self.__dict__ or (self.work / CLAIM).exists():
            source = replace(source, dtype=self.recipe.head.dtype)
        return read_target(source)

    @functools.cached_property
    def encoder(self) -> Encoder:
        text = self.recipe.template_arguments
        try:
            arguments = json.loads(text)
        except ValueError as error:
            raise ValueError(f"template_arguments is no JSON object ({error}): {text}") from error
        return Encoder(self.target.tokenizer, self.target.eos_token_ids, arguments)

    @functools.cached_property
    def sources(self) -> list[list[UserPrompt]]:
        """The prompts of files, data sets and documents."""
        context = self.target.config.max_position_embeddings
        return read_sources(self.recipe, self.encoder, context, self.dropped)

    @functools.cached_property
    def runs(self) -> Evaluated:
        """Runs of words of all evaluated sets."""
        return evaluated_runs(self.recipe.evaluated)

    @functools.cached_property
    def beginning(self) -> Source | None:
        """The head that training starts from, without its selector; None for a new head."""
        name, ignored = self.options.draft_head, self.options.ignore_config_keys
        if name is None:
            return None
        given = Source(draft_head_at(name), ignore_config_keys=ignored)
        if given.head_config.selector is None:
            return given
        folder = self.work / BEGINNING
        if not folder.exists():
            export_head(name, folder, "jetspec", without_selector=True, ignore_config_keys=ignored)
        return replace(given, path_or_id=folder)

    @functools.cached_property
    def head_config(self) -> DraftHeadConfig:
        """The config of the head that is trained."""
        if self.beginning is not None:
            return self.beginning.head_config
        return parse_draft_head_config(head_json(self.target, self.recipe.head.head))

    def claim(self) -> None:
        """Claims the work folder for the options and the target's weights.

        Raises:
            ValueError: The folder has another target or other options.
        """
        options = self.options.claimed()
        if (self.work / CLAIM).exists():  # options come first, because another target may be too large
            weights = read_json(self.work / CLAIM).get("target_weights")
            claim(self.work, {**options, "target_weights": weights}, CLAIM)
        claim(self.work, {**options, "target_weights": fingerprint(self.target.weights)}, CLAIM)

    def check_stage(self) -> None:
        """Chooses the recipe, tries each kind of work for some seconds, and says what all will cost."""
        begun, options = time.monotonic(), self.options
        fresh(self.work / BEGINNING)  # it may be of other options, which were refused
        recipe = read_recipe(
            self.target,
            options.recipe,
            options.settings,
            options.changes,
            devices=jax.device_count(),
            gpu=jax.default_backend() == "gpu",
            begun=options.draft_head is not None,
        )
        check_recipe(recipe, self.target)
        self.recipe = recipe
        if resolve_dtype(recipe.head.dtype) != self.target.dtype:
            del self.target  # to be loaded in the recipe's dtype
        check_head_fits(self.head_config, self.target.config)
        # All sets are read, so that a missing set is an error before anything is made.
        given = [*map(len, self.sources)]
        print(f"  {sum(given):,} prompts are given; {self.runs.count:,} evaluated runs of words", flush=True)
        answered(recipe, given)  # weights that do not suit the sources are an error too
        if not recipe.writing:
            self.check_count(sum(given), recipe)
        if jax.default_backend() == "cpu" and options.total_minutes is None and not options.yes:
            ask_for_hours(rough_hours(self.target.config, recipe, given))
        rates = self._trial(recipe)
        recipe = self.recipe = with_dropped_replaced(recipe, rates.kept)
        if options.total_minutes is not None:
            spent = (time.monotonic() - begun) / 60
            recipe = fitted(recipe, rates, self.head_config, given, options.total_minutes, spent)
            self.recipe = recipe
        cost = cost_of(recipe, rates, self.head_config, given)
        print("\n".join(cost.lines()), flush=True)
        check_disk(self.work, cost.disk)
        write_text(self.work / RECIPE, toml_of(asdict(recipe)))
        write_json(self.work / ESTIMATE, {name: round(value, 2) for name, value in cost.minutes.items()})
        self.claim()

    def _trial(self, recipe: PairRecipe) -> Rates:
        folder = fresh(self.work / "trial")
        count, sampling = 2 * recipe.slots, SamplingParams(temperature=1.0, max_tokens=recipe.max_tokens)
        kept = 1.0
        if recipe.writing:
            begun, given = beginnings(recipe), to_write(self.encoder, recipe)
            places = [i * len(begun) // count for i in range(count)]
            chosen = Prompts([given.tokens[i] for i in places], [given.params[i] for i in places])
        else:
            begun, places = [], []
            given = [prompt for prompts in self.sources for prompt in prompts]
            chosen = Prompts(
                [given[i * len(given) // count].tokens for i in range(count)], [sampling] * count
            )
        texts, speed = trial_texts(folder / "texts", self.target, chosen, recipe)
        if recipe.writing:
            written = read_written(texts, [begun[i] for i in places], self.encoder, recipe.filters)
            written.check(recipe.filters.least_kept)
            kept = len(written.prompts) / count
            print(f"  {kept:.0%} of {count} prompts that it wrote are kept", flush=True)
        rates = trial_rates(folder, self.target, texts, speed, recipe, self.beginning)._replace(kept=kept)
        shutil.rmtree(folder)
        return rates

    def check_count(self, count: int, recipe: PairRecipe) -> None:
        """Raises ValueError if so many prompts are too few to hold some out."""
        if count < 2 * recipe.heldout:
            raise ValueError(
                f"{count} prompts are left, and {2 * recipe.heldout} are needed, twice heldout; bring more "
                f"prompts, or let the target write more (dropped: {drop_words(self.dropped)})"
            )

    def prompts_stage(self) -> None:
        """Lets the target write prompts, keeps all that can be learnt from, and holds some of them out."""
        recipe, rng = self.recipe, np.random.default_rng([self.recipe.seed, 1])
        written, sources = [], self.sources
        if recipe.writing:
            self._regenerate("written", to_write(self.encoder, recipe), (recipe.seed,))
            documents = Documents.open(self.work / "written")
            found = read_written(documents, beginnings(recipe), self.encoder, recipe.filters)
            found.check(recipe.filters.least_kept)
            written, self.dropped = found.prompts, self.dropped + found.dropped
        kept, overlapping = without_overlap(mixed(recipe, written, sources), self.runs)
        self.dropped += overlapping
        self.check_count(len(kept), recipe)
        chosen = sorted(rng.permutation(len(kept))[: recipe.most_prompts].tolist())
        # Sorted by kind and form, so that temperatures alternate within each.
        prompts = sorted((kept[i] for i in chosen), key=lambda prompt: (prompt.kind, prompt.form))
        temperatures = recipe.temperatures
        rows = [
            {
                "kind": prompt.kind,
                "form": prompt.form,
                "temperature": temperatures[place % len(temperatures)],
                "text": prompt.text,
                "root": prompt.root or prompt.text,
                "tokens": prompt.tokens,
            }
            for place, prompt in enumerate(prompts)
        ]
        rows = [rows[i] for i in rng.permutation(len(rows))]
        new = max(recipe.judgement.max_tokens, recipe.calibration.max_tokens) + self.head_config.depth
        training, split = split_prompts(rows, recipe, self.target.config.max_position_embeddings - new)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in training]
        write_text(self.work / "prompts.jsonl", "".join(lines))
        write_json(self.work / HELD, split._asdict())
        counts = {
            "kept": Counter(f"{prompt.kind} {prompt.form}".strip() for prompt in prompts),
            "left_out": len(kept) - len(prompts),
            "dropped": drop_words(self.dropped),
            "evaluated": [given.partition("=")[0] for given in recipe.evaluated],
            "run": RUN,
        }
        write_json(self.work / "prompts.json", counts)
        print(f"  {json.dumps(counts)}", flush=True)

    def answers_stage(self) -> None:
        """The target's answers, some greedy and some sampled."""
        recipe, training = self.recipe, read_rows(self.work / "prompts.jsonl")
        rows = [*training, *self._split().choosing]  # training gets no other held-out prompts
        held = range(len(training), len(rows))
        params = [
            SamplingParams(temperature=row["temperature"], max_tokens=recipe.max_tokens) for row in rows
        ]
        prompts = Prompts([row["tokens"] for row in rows], params)
        self._regenerate("answers", prompts, (recipe.seed, 2), held, [row["kind"] for row in rows])
        documents = Documents.open(self.work / "answers")
        print(f"  {len(documents):,} answers with {documents.lengths.sum():,} tokens to train on", flush=True)

    def head_stage(self) -> None:
        """The head's training."""
        self._train("head", self.recipe.head, self.beginning)

    def selector_stage(self) -> None:
        """The training of a selector beside the finished head."""
        head = replace(self.options.source, path_or_id=self.work / "head" / "draft_head")
        self._train("selector", self.recipe.selector, head)

    def calibrate_stage(self) -> None:
        """Fits the draft scales."""
        fit, head, work = (
            self.recipe.calibration,
            self.work / "selector" / "draft_head",
            self.work / "calibrate",
        )
        prompts = [prompt["tokens"] for prompt in self._split().calibrated]
        given = work, self.target, self._read_head(head), prompts, sorted(set(fit.temperatures))
        limits = {"max_tokens": fit.max_tokens, "batch": self.recipe.slots, "deadline": self.deadline}
        scales = calibrate(*given, **limits)
        out, ignored = fresh(work / "draft_head"), self.options.ignore_config_keys
        export_head(head, out, "jetspec", draft_scales=scales, ignore_config_keys=ignored)
        print(f"  draft_scales: {scales}", flush=True)

    def judge_stage(self) -> None:
        """Tokens per round and speed on held-out prompts, a temperature at a time."""
        recipe, split = self.recipe, self._split()
        prompts = [prompt["tokens"] for prompt in split.judged]
        head = self._read_head(self.work / "calibrate" / "draft_head")
        budgets, device = sorted(set(recipe.judgement.budgets)), jax.devices()[0].device_kind
        trees = [evaluation_trees(head.config, recipe.head.evaluation, budget) for budget in budgets]
        paths = {t: self.work / "judge" / f"{t:g}.json" for t in sorted(set(recipe.judgement.temperatures))}
        # Speeds of two devices are not compared.
        left = [
            t for t, path in paths.items() if not path.exists() or read_json(path).get("device") != device
        ]
        given = self.target, head, prompts, trees, left, recipe.judgement.max_tokens, recipe.seed
        self.deadline.check("before the judgement")
        # Closed even if time is up, because it has engines.
        with contextlib.closing(measure(*given)) as measured:
            for temperature, found in measured if left else ():
                write_json(paths[temperature], {"device": device, "rows": found})
                if temperature != left[-1]:
                    self.deadline.check(f"after T = {temperature:g}")
        rows = [row for path in paths.values() for row in read_json(path)["rows"]]
        report = judgement_of(rows, split, self.target)
        draw_judgement(report, self.options.name, self.work / "judge.svg")
        write_json(self.work / "judge.json", report)
        print("\n".join(table_of(report)), flush=True)
        print(f"  recommended budget: {report['recommended_budget']}", flush=True)

    def export_stage(self) -> None:
        """Writes the folder to serve: the head, the head without its selector, and a card."""
        head, out = self.work / "calibrate" / "draft_head", fresh(self.work / "export")
        ignored = self.options.ignore_config_keys
        export_head(head, out, "jetspec", ignore_config_keys=ignored)
        export_head(head, out / WITHOUT_SELECTOR, "vllm", without_selector=True, ignore_config_keys=ignored)
        licence = None
        try:
            licence = licence_of(resolve(self.options.target, CARD_PATTERNS))
        except FileNotFoundError as error:  # a hub that cannot be reached any more
            print(f"  the target's card cannot be read: {error}", flush=True)
        report, prompts = read_json(self.work / "judge.json"), read_json(self.work / "prompts.json")
        depth = self._head_source(head).head_config.depth
        write_text(out / "README.md", card_of(self.options.name, licence, depth, report, prompts))
        print(f"  licence of the target: {licence or 'unknown'}", flush=True)

    def _read_head(self, folder: Path) -> Head:
        return read_draft_head(self._head_source(folder), self.target)

    def _head_source(self, folder: Path) -> Source:
        return Source(folder, self.recipe.head.dtype, self.options.ignore_config_keys)

    def _train(self, name: str, recipe: HeadRecipe, checkpoint: Source | None) -> None:
        work = self.work / name
        data = self.work / "answers"
        train_head(work, recipe, self.target, data, self.deadline, checkpoint=checkpoint, label=name)
        print(f"  {read_verdict(work).message}", flush=True)

    def _split(self) -> Split:
        return Split(**read_json(self.work / HELD))

    def _regenerate(
        self,
        name: str,
        prompts: Prompts,
        seed: Sequence[int],
        held: Sequence[int] = (),
        sources: Sequence[str] | None = None,
    ) -> None:
        settings = regeneration_settings(
            prompts,
            target=self.options.name,
            vocab_size=self.target.config.vocab_size,
            dtype=str(self.target.dtype),
            seed=seed,
            source=name,
            heldout=len(held),
            shard_documents=self.recipe.shard_documents,
        )
        writer = Writer(self.work / name, settings, held, sources)
        regenerate(writer, self.target, prompts, slots=self.recipe.slots, deadline=self.deadline)


def check_recipe(recipe: PairRecipe, target: Target) -> None:
    """Raises ValueError if a recipe is not valid, or does not suit a target."""
    if not has_chat_template(target) and (recipe.writing or not (recipe.prompts or recipe.documents)):
        raise ValueError(
            "the target has no chat template, so it cannot write prompts: bring texts whose beginnings it "
            "continues, --documents FILE, or prompts, --prompts FILE"
        )
    recipe.check()
    if recipe.head.head.start != "checkpoint":
        mask_token_id(target, recipe.head.head.mask_token)
    context = target.config.max_position_embeddings
    longest = recipe.filters.max_tokens + max(recipe.max_tokens, recipe.judgement.max_tokens)
    if recipe.writing and longest > context:
        raise ValueError(
            f"written prompts of {recipe.filters.max_tokens} tokens and their answers do not fit the "
            f"target's context of {context}: set filters.max_tokens, max_tokens or judgement.max_tokens lower"
        )


def ask_for_hours(hours: float) -> None:
    """Asks whether a CPU should work for so many hours.

    Raises:
        ValueError: The answer is no, or there is nobody to ask.
    """
    if hours <= MOST_HOURS:
        return
    text = f"there is no GPU, and this CPU would take about {hours:,.0f} hours"
    if sys.stdin.isatty() and input(f"{text}; go on? [y/N] ").strip().lower() in ("y", "yes"):
        return
    raise ValueError(f"{text}; use a GPU, give --total-minutes N, which makes less, or --yes, which goes on")
