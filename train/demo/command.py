"""``python -m train demo`` and ``manifest``: the demo pair from its corpus, stage by stage.

The work folder holds ``tokenizer/``, ``tokens/``, ``target/`` and ``head/`` (checkpoints and logs),
``regenerated/``, and at the end ``demo/`` with the finished pair.
"""

import argparse
import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.checkpoint.loading import load_draft_head, load_target
from jetspec_jax.cli.options import add_target_option
from jetspec_jax.config import parse_model_config
from train.data.manifest import TRAIN
from train.demo.continuations import continue_corpus, cut_splits
from train.demo.corpus import (
    LIBRARY,
    ORIGIN,
    VALIDATION,
    VERSION,
    CorpusFile,
    CorpusManifest,
    build_manifest,
    own_library,
    read_corpus,
)
from train.demo.evaluate import evaluate, prompt_texts
from train.demo.recipes import DEMO, PairRecipe
from train.demo.report import render
from train.demo.target import target_json, train_target, write_target
from train.demo.tokenizer import Tokenizer
from train.demo.tokens import encode_split, save_array
from train.demo.unlikelihood import polish
from train.head.training import train_head
from train.loop.stages import Deadline, claim, fresh, run_stages


def add_command(commands: Any) -> None:
    """Adds the command lines that make the demo pair and list its corpus."""
    demo = commands.add_parser("demo", help="make the demo pair: tokenizer, target, draft head")
    demo.set_defaults(run=_demo)
    demo.add_argument("--work", type=Path, required=True, help="folder for everything made")
    demo.add_argument("--corpus", type=Path, help=f"Lib folder of CPython {VERSION}; default: this Python's")
    add_target_option(demo, "keep this finished target and make only its head", type=Path)
    demo.add_argument("--minutes", type=float, help="stop cleanly after so many minutes; run again to resume")
    manifest = commands.add_parser("manifest", help="list a corpus, with hashes and splits")
    manifest.set_defaults(run=_manifest)
    manifest.add_argument("--corpus", type=Path, required=True)
    manifest.add_argument("--out", type=Path, required=True)


def _demo(arguments: argparse.Namespace) -> int:
    make_pair(
        DEMO,
        arguments.work,
        arguments.corpus or own_library(),
        minutes=arguments.minutes,
        finished_target=arguments.target,
    )
    print(f"the pair is in {arguments.work / 'demo'}")
    return 0


def _manifest(arguments: argparse.Namespace) -> int:
    name = f"CPython {VERSION} standard library (Lib)"
    build_manifest(arguments.corpus, name=name, origin=ORIGIN).write(arguments.out)
    return 0


def make_pair(
    recipe: PairRecipe,
    work: Path,
    corpus: Path,
    *,
    minutes: float | None = None,
    finished_target: Path | None = None,
) -> None:
    """Runs the stages of a recipe that are not done.

    Args:
        recipe: The recipe.
        work: The folder for everything that is made.
        corpus: The standard library's folder.
        minutes: Time after which the run saves and stops.
        finished_target: A finished target of this recipe, with its tokenizer, whose head is made.

    Raises:
        OutOfTime: The limit was reached; the same call resumes.
        ValueError: The corpus is not the recipe's, or the folder is another recipe's.
    """
    claim(work, {**asdict(recipe), "finished_target": finished_target and str(finished_target)})
    pair = _Pair(recipe, work, corpus, Deadline(minutes), finished_target)
    stages = {
        "corpus": pair.corpus_stage,
        "tokenizer": pair.tokenizer_stage,
        "target": pair.target_stage,
        "regenerate": pair.regenerate_stage,
        "head": pair.head_stage,
        "evaluate": pair.evaluate_stage,
    }
    run_stages(work, stages, pair.deadline)


class _Pair:
    """The stages and their shared state, which is loaded on first use."""

    def __init__(
        self, recipe: PairRecipe, work: Path, corpus: Path, deadline: Deadline, finished_target: Path | None
    ):
        self.recipe, self.work, self.corpus, self.deadline = recipe, work, corpus, deadline
        self.finished_target = finished_target
        self.demo = work / "demo"

    @functools.cached_property
    def manifest(self) -> CorpusManifest:
        return CorpusManifest.read(self.recipe.manifest_path())

    @functools.cached_property
    def sources(self) -> dict[CorpusFile, str]:
        return read_corpus(self.corpus, self.manifest)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.work / "tokenizer")

    def stream(self, split: str) -> np.ndarray:
        return np.load(self.work / "tokens" / f"{split}.npy")

    def corpus_stage(self) -> None:
        print(f"  {self.manifest.name}: {len(self.sources)} files, all as listed", flush=True)

    def tokenizer_stage(self) -> None:
        recipe = self.recipe
        texts = [
            text
            for source, text in self.sources.items()
            if source.split == TRAIN
            for _ in range(recipe.library_repeats if source.kind == LIBRARY else 1)
        ]
        if self.finished_target is None:
            tokenizer = Tokenizer.train(texts, recipe.vocab_size)
        else:
            tokenizer = Tokenizer.read(self.finished_target)
        for folder in ("tokenizer", "tokens"):
            (self.work / folder).mkdir(exist_ok=True)
        for name, text in tokenizer.files(max_length=recipe.context).items():
            (self.work / "tokenizer" / name).write_text(text, encoding="utf-8")
        for split in (TRAIN, VALIDATION):
            stream = encode_split(tokenizer, self.sources, split, library_repeats=recipe.library_repeats)
            save_array(self.work / "tokens" / f"{split}.npy", stream)
            print(f"  {split}: {len(stream)} tokens", flush=True)

    def target_stage(self) -> None:
        if self.finished_target is not None:
            shutil.copytree(self.finished_target, fresh(self.demo / "target"))
            return
        config = parse_model_config(target_json(self.recipe))
        streams = self.stream(TRAIN), self.stream(VALIDATION)
        weights = train_target(self.work / "target", self.recipe, config, *streams, self.deadline)
        weights = polish(
            self.work / "polish",
            self.recipe,
            config,
            weights,
            streams,
            self.tokenizer.newline_ids(),
            self.deadline,
        )
        write_target(self.demo / "target", self.recipe, self.tokenizer, weights)

    def regenerate_stage(self) -> None:
        recipe, settings = self.recipe, self.recipe.regeneration
        count, seed = settings.shards * settings.sequences, (recipe.seed,)
        cuts = cut_splits(
            self.stream(TRAIN),
            self.stream(VALIDATION),
            self.tokenizer.newline_ids(),
            count=count,
            heldout=settings.held(count),
            prompt=settings.prompt,
            temperatures=settings.temperatures,
            seed=seed,
        )
        continue_corpus(
            self.work / "regenerated",
            load_target(self.demo / "target"),
            cuts.prompts(settings.length),
            name=recipe.name,
            seed=seed,
            held=cuts.held_indices,
            shard_documents=settings.sequences,
            slots=settings.slots,
            deadline=self.deadline,
        )
        print(f"  {count * settings.length} tokens, prompts included", flush=True)

    def head_stage(self) -> None:
        recipe, target = self.recipe.head, load_target(self.demo / "target")
        made = train_head(self.work / "head", recipe, target, self.work / "regenerated", self.deadline)
        shutil.copytree(made, fresh(self.demo / "draft_head"))

    def evaluate_stage(self) -> None:
        target = load_target(self.demo / "target")
        head = load_draft_head(self.demo / "draft_head", target=target)
        path = self.demo / "evaluation.json"
        results = evaluate(path, self.recipe, target, head, self.tokenizer, self.sources, self.deadline)
        results = {
            **results,
            "block_size": head.config.block_size,
            "target_parameters": _parameters(target.weights),
            "head_parameters": _parameters(head.weights),
            "bytes": sum(f.stat().st_size for f in self.demo.glob("*/*") if f.is_file()),
        }
        write_json(path, results)
        texts = prompt_texts(self.recipe, self.tokenizer, self.sources)
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (self.demo / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        readme = render(self.recipe, self.manifest, results)
        (self.demo / "README.md").write_text(readme, encoding="utf-8")


def _parameters(weights: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(weights))
