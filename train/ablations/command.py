"""``python -m train ablations``: the JetSpec paper's comparisons, at the scale of the demo pair.

Nine heads of one size are trained for the embedded target on the same number of documents and steps. Each
differs from the first in one setting, and all decode the same held-out prompts. The same command resumes.
Source of the expected orderings: the paper's ablations (arXiv 2606.18394).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from jetspec_jax.checkpoint.loading import Head, Target, load_draft_head, load_target
from jetspec_jax.demo import DEMO_TARGET
from train.ablations.report import write_report
from train.data.documents import Documents
from train.data.given import write_given
from train.data.manifest import HELDOUT, TRAIN
from train.demo.continuations import SplitCuts, continue_corpus, cut_splits
from train.demo.corpus import VALIDATION, CorpusFile, CorpusManifest, own_library, read_corpus
from train.demo.evaluate import Results, heldout_prompts, tau
from train.demo.recipes import DEMO, PairRecipe
from train.demo.tokenizer import Tokenizer
from train.demo.tokens import encode_split
from train.head.recipe import HeadRecipe
from train.head.recipe_file import add_set_option, read_head_recipe
from train.head.training import train_head, validate
from train.loop.stages import Deadline, claim, run_stages

#: Budgets and temperatures at which each head decodes.
DECODED = ((16, 0.0), (64, 0.0), (256, 0.0), (64, 1.0))


@dataclass(frozen=True)
class Variant:
    """A head that differs from the first in one setting.

    Attributes:
        label: Its name in the report.
        change: Makes its recipe from the first one's.
        text: Which documents it learns from: "regenerated" or "corpus".
    """

    label: str
    change: Callable[[HeadRecipe], HeadRecipe] = lambda recipe: recipe
    text: str = "regenerated"


def _objective(**changes: Any) -> Callable[[HeadRecipe], HeadRecipe]:
    return lambda recipe: replace(recipe, objective=replace(recipe.objective, **changes))


def _both_ways(gamma: float) -> Callable[[HeadRecipe], HeadRecipe]:
    def change(recipe: HeadRecipe) -> HeadRecipe:
        recipe = replace(recipe, head=replace(recipe.head, causal=False))
        return _objective(gamma=gamma)(recipe)

    return change


VARIANTS: Mapping[str, Variant] = {
    "forward_kl": Variant("forward KL, causal, gamma 0"),
    "sft": Variant("hard labels (SFT)", _objective(loss="sft")),
    "reverse_kl": Variant("reverse KL", _objective(loss="reverse_kl")),
    "total_variation": Variant("total variation", _objective(loss="total_variation")),
    "dpace": Variant("D-PACE", _objective(loss="dpace")),
    "bidirectional": Variant("bidirectional", _both_ways(0.0)),
    "causal_gamma7": Variant("gamma 7", _objective(gamma=7.0)),
    "bidirectional_gamma7": Variant("bidirectional, gamma 7", _both_ways(7.0)),
    "corpus": Variant("corpus text", text="corpus"),
}


def add_command(commands: Any) -> None:
    """Adds the command ``ablations``."""
    parser = commands.add_parser("ablations", help="compare ways to train a head", description=__doc__)
    parser.set_defaults(run=run)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument("--corpus", type=Path, help="Lib folder of the demo's corpus; default: this Python's")
    add_set_option(parser, "all variants'")
    parser.add_argument("--documents", type=int, default=24576, help="of each kind (default: 24576)")
    parser.add_argument(
        "--text-temperatures",
        type=float,
        nargs="+",
        # On text sampled from the target, hard labels and forward KL have the same optimum.
        default=[1.0],
        help="each regenerated document is written at one of these (default: 1)",
    )
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts decoded (default: 64)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--minutes", type=float, help="stop cleanly after so many minutes; run again to resume"
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains and measures the missing variants, then writes the report.

    Raises:
        OutOfTime: The limit was reached.
        ValueError: A setting is not valid, or the folder was begun with others.
    """
    ablations = Ablations(
        DEMO,
        read_head_recipe("ablations", arguments.set),
        arguments.work,
        arguments.corpus or own_library(),
        documents=arguments.documents,
        temperatures=arguments.text_temperatures,
        prompts=arguments.prompts,
        variants=arguments.variants,
        deadline=Deadline(arguments.minutes),
    )
    ablations.run()
    return 0


class Ablations:
    """The stages and their shared state, which is loaded on first use."""

    def __init__(
        self,
        demo: PairRecipe,
        recipe: HeadRecipe,
        work: Path,
        corpus: Path,
        *,
        documents: int,
        temperatures: Sequence[float],
        prompts: int,
        variants: Sequence[str],
        deadline: Deadline,
        target: Path = DEMO_TARGET,
    ):
        """Claims the work folder.

        Args:
            demo: The recipe of the target's corpus and of the prompts.
            recipe: The recipe of the first variant.
            work: The folder for everything that is made.
            corpus: The standard library's folder.
            documents: Documents of each kind of text.
            temperatures: Each regenerated document has one of these.
            prompts: Held-out prompts that are decoded.
            variants: Names of the heads.
            deadline: When to stop, after saving.
            target: The heads' target.

        Raises:
            ValueError: The folder was begun with other settings.
        """
        self.demo = replace(demo, evaluation=replace(demo.evaluation, prompts=prompts))
        self.recipe, self.work, self.corpus, self.documents = recipe, work, corpus, documents
        self.temperatures = tuple(temperatures)
        self.variants, self.deadline, self.target_path = variants, deadline, target
        claim(
            work,
            {
                **asdict(recipe),
                "documents": documents,
                "text_temperatures": list(temperatures),
                "prompts": prompts,
            },
        )
        self.results = Results(work / "results.json", deadline)

    def run(self) -> None:
        """Runs the missing stages and writes ``report/``.

        Raises:
            OutOfTime: The deadline passed; call again to resume.
        """
        stages = {"regenerated": self._regenerate, "corpus text": self._take_corpus}
        stages |= {name: partial(self._train, name) for name in self.variants}
        run_stages(self.work, stages, self.deadline)
        self._measure()  # not a stage, because later runs may add variants; `Results` skips what it holds
        verdicts = write_report(self.work / "report", self._report())
        for verdict in verdicts:
            print(f"{'holds' if verdict.holds else 'DOES NOT HOLD'}: {verdict.claim}: {verdict.figures}")
        print(f"the report is in {self.work / 'report'}")

    @cached_property
    def _target(self) -> Target:
        return load_target(self.target_path)

    @cached_property
    def _sources(self) -> dict[CorpusFile, str]:
        return read_corpus(self.corpus, CorpusManifest.read(self.demo.manifest_path()))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.target_path)

    @cached_property
    def _cuts(self) -> SplitCuts:
        """The prompts of documents, the same for both kinds of text."""
        settings, repeats = self.demo.regeneration, self.demo.library_repeats
        train, held = (
            encode_split(self._tokenizer, self._sources, split, library_repeats=repeats)
            for split in (TRAIN, VALIDATION)
        )
        return cut_splits(
            train,
            held,
            self._tokenizer.newline_ids(),
            count=self.documents,
            heldout=settings.held(self.documents),
            prompt=settings.prompt,
            temperatures=self.temperatures,
            seed=(self.demo.seed,),
        )

    def _regenerate(self) -> None:
        settings = self.demo.regeneration
        continue_corpus(
            self.work / "regenerated",
            self._target,
            self._cuts.prompts(settings.length),
            name="demo",
            seed=(self.demo.seed,),
            held=self._cuts.held_indices,
            shard_documents=settings.sequences,
            slots=settings.slots,
            deadline=self.deadline,
        )

    def _take_corpus(self) -> None:
        write_given(
            self.work / "corpus",
            self._cuts.documents(self.demo.regeneration.length),
            target="demo",
            vocab_size=self._target.config.vocab_size,
            source="lines of the corpus",
            held=self._cuts.held_indices,
            shard_documents=self.demo.regeneration.sequences,
            deadline=self.deadline,
        )

    def _train(self, name: str) -> None:
        variant = VARIANTS[name]
        data = self.work / variant.text
        train_head(
            self._folder(name), variant.change(self.recipe), self._target, data, self.deadline, label=name
        )

    def _measure(self) -> None:
        prompts, _ = heldout_prompts(self.demo, self._tokenizer, self._sources)
        settings = self.demo.evaluation
        for name in self.variants:
            head = load_draft_head(self._folder(name) / "draft_head", target=self._target)
            self.results.part(f"{name}/validation", partial(self._validate, head))
            for budget, temperature in DECODED:
                measure = partial(
                    tau, self._target, head, prompts, settings, temperature, budget, settings.width
                )
                self.results.part(f"{name}/tau/T={temperature:g}/{budget}", measure)

    def _folder(self, name: str) -> Path:
        return self.work / "heads" / name

    def _validate(self, head: Head) -> dict[str, Any]:
        """Accuracy and accepted length on held-out regenerated text, the same for all variants."""
        record = validate(head, self._target, Documents.open(self.work / "regenerated", HELDOUT), self.recipe)
        return {key: record[f"validation_{key}"] for key in ("accepted_length", "accuracy_by_depth")}

    def _report(self) -> dict[str, Any]:
        parts, device = self.results.parts, jax.devices()[0]
        return {
            "device": f"{device.device_kind}, JAX {jax.__version__}",
            "dtype": str(self._target.weights["embed_tokens"].dtype),
            "budgets": [budget for budget, temperature in DECODED if temperature == 0],
            "text_temperatures": list(self.temperatures),
            "steps": self.recipe.fit.steps,
            "batch": self.recipe.fit.batch,
            "documents": self.documents,
            "prompts": self.demo.evaluation.prompts,
            "width": self.demo.evaluation.width,
            "variants": {
                name: {
                    "label": VARIANTS[name].label,
                    "tau": {str(b): parts[f"{name}/tau/T={t:g}/{b}"] for b, t in DECODED if t == 0},
                    "tau_sampled": {str(b): parts[f"{name}/tau/T={t:g}/{b}"] for b, t in DECODED if t > 0},
                    **parts[f"{name}/validation"],
                }
                for name in self.variants
            },
        }
