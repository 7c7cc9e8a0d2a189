"""The demo's recipe from the corpus to the finished pair, stage by stage.

The work folder holds ``tokenizer/``, ``tokens/``, ``target/`` and ``head/`` (checkpoints and logs),
``regenerated/``, and at the end ``demo/``: the pair as it is shipped.
"""

import functools
import json
from pathlib import Path

import jax
import numpy as np

from jetspec_jax.checkpoint import load_draft_head, load_target
from jetspec_jax.config import parse_draft_head_config, parse_model_config
from train import layout
from train.corpus import LIBRARY, TRAIN, VALIDATION, Manifest, Source, load_documents
from train.evaluate import evaluate, heldout_prompts
from train.head import train_head
from train.recipes import Recipe
from train.regenerate import Regenerated, regenerate
from train.report import render
from train.stages import Deadline, claim, run_stages
from train.target import train_target
from train.tokenizer import Tokenizer
from train.tokens import encode_split, save_array
from train.unlikelihood import polish


def make_pair(recipe: Recipe, work: Path, corpus: Path, *, minutes: float | None = None) -> None:
    """Runs what is not done of a recipe.

    Args:
        recipe: What to make.
        work: Everything made goes here.
        corpus: The standard library's folder.
        minutes: Stop, after saving, when this much time has passed.

    Raises:
        OutOfTime: The limit was reached; the same call goes on.
        ValueError: The corpus is not the recipe's, or the folder is another recipe's.
    """
    claim(work, recipe)
    pair = _Pair(recipe, work, corpus, Deadline(minutes))
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
    """The stages, and what they share, which is read when it is first needed."""

    def __init__(self, recipe: Recipe, work: Path, corpus: Path, deadline: Deadline):
        self.recipe, self.work, self.corpus, self.deadline = recipe, work, corpus, deadline
        self.demo = work / "demo"

    @functools.cached_property
    def manifest(self) -> Manifest:
        return Manifest.read(self.recipe.manifest_path())

    @functools.cached_property
    def documents(self) -> dict[Source, str]:
        return load_documents(self.corpus, self.manifest)

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.read(self.work / "tokenizer")

    def stream(self, split: str) -> np.ndarray:
        return np.load(self.work / "tokens" / f"{split}.npy")

    def corpus_stage(self) -> None:
        print(f"  {self.manifest.name}: {len(self.documents)} files, all as listed", flush=True)

    def tokenizer_stage(self) -> None:
        recipe = self.recipe
        texts = [
            text
            for source, text in self.documents.items()
            if source.split == TRAIN
            for _ in range(recipe.library_repeats if source.kind == LIBRARY else 1)
        ]
        tokenizer = Tokenizer.train(texts, recipe.vocab_size)
        for folder in ("tokenizer", "tokens"):
            (self.work / folder).mkdir(exist_ok=True)
        for name, text in tokenizer.files(max_length=recipe.context).items():
            (self.work / "tokenizer" / name).write_text(text, encoding="utf-8")
        for split in (TRAIN, VALIDATION):
            stream = encode_split(tokenizer, self.documents, split, library_repeats=recipe.library_repeats)
            save_array(self.work / "tokens" / f"{split}.npy", stream)
            print(f"  {split}: {len(stream)} tokens", flush=True)

    def target_stage(self) -> None:
        config = parse_model_config(layout.target_json(self.recipe))
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
        layout.write_target(self.demo / "target", self.recipe, self.tokenizer, weights)

    def regenerated(self) -> Regenerated:
        return regenerate(
            self.work / "regenerated",
            self.recipe,
            load_target(self.demo / "target"),
            self.stream(TRAIN),
            self.tokenizer.newline_ids(),
            self.deadline,
        )

    def regenerate_stage(self) -> None:
        print(f"  {self.regenerated().tokens.size} tokens, prompts included", flush=True)

    def head_stage(self) -> None:
        config = parse_draft_head_config(layout.head_json(self.recipe))
        target, text = load_target(self.demo / "target"), self.regenerated()
        weights = train_head(self.work / "head", self.recipe, config, target, text, self.deadline)
        layout.write_head(self.demo / "draft_head", self.recipe, weights)

    def evaluate_stage(self) -> None:
        target = load_target(self.demo / "target")
        head = load_draft_head(self.demo / "draft_head", target=target)
        path = self.demo / "evaluation.json"
        results = evaluate(path, self.recipe, target, head, self.tokenizer, self.documents, self.deadline)
        results = {
            **results,
            "target_parameters": _parameters(target.weights),
            "head_parameters": _parameters(head.weights),
            "bytes": sum(f.stat().st_size for f in self.demo.glob("*/*") if f.is_file()),
        }
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        prompts, _ = heldout_prompts(self.recipe, self.tokenizer, self.documents)
        lines = [json.dumps({"text": self.tokenizer.decode(prompt)}) + "\n" for prompt in prompts]
        (self.demo / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        readme = render(self.recipe, self.manifest, results)
        (self.demo / "README.md").write_text(readme, encoding="utf-8")


def _parameters(weights: object) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(weights))
