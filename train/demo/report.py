"""The README of the demo's folder, from a template, the recipe and ``evaluation.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train.data.manifest import HELDOUT
from train.demo.corpus import LIBRARY, TESTS, CorpusManifest
from train.demo.recipes import PairRecipe

TEMPLATE = Path(__file__).with_name("readme.md")
LOSSES = {
    "forward_kl": "Forward KL to the target's logits",
    "reverse_kl": "Reverse KL to the target's logits",
    "sft": "Cross-entropy with the next tokens (hard labels)",
}


def render(recipe: PairRecipe, manifest: CorpusManifest, results: Mapping[str, Any]) -> str:
    """The README in Markdown; every figure of a measurement comes from the results."""
    text, settings = recipe.regeneration, recipe.evaluation
    held = [s.path for s in manifest.files if (s.split, s.kind) == (HELDOUT, LIBRARY)]
    return TEMPLATE.read_text(encoding="utf-8").format(
        target_millions=results["target_parameters"] / 1e6,
        head_millions=results["head_parameters"] / 1e6,
        megabytes=results["bytes"] / 1e6,
        block_size=results["block_size"],
        corpus=manifest.name,
        files=len(manifest.files),
        manifest=recipe.manifest,
        licence=manifest.licence,
        vocab_size=recipe.vocab_size,
        library_repeats=recipe.library_repeats,
        loss=LOSSES[recipe.head.objective.loss],
        regenerated_millions=text.shards * text.sequences * text.length / 1e6,
        temperatures=", ".join(f"{t:g}" for t in sorted(set(text.temperatures))),
        polish_ngram=recipe.polish.ngram,
        polish_times={1: "second", 2: "third"}[recipe.polish.times],
        polish_rounds=recipe.polish.rounds,
        heldout_library=results["heldout_bytes"][LIBRARY] / 1e6,
        heldout_tests=results["heldout_bytes"][TESTS] / 1e6,
        heldout_modules=", ".join(f"`{path}`" for path in held if "/" not in path),
        device=results["device"],
        dtype=results["dtype"],
        bits_table=bits_table(results),
        stride=settings.stride,
        ngram=settings.ngram,
        prompts=settings.prompts,
        kept_prompts=settings.kept_prompts,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        greedy_repetition=results["repetition/greedy text"],
        text_repetition=results["repetition/held-out text"],
        tau_table=tau_table(results),
    )


def bits_table(results: Mapping[str, Any]) -> str:
    """Bits per byte, the best model first."""
    prefix = "bits_per_byte/"
    rows = {key.removeprefix(prefix): x for key, x in results.items() if key.startswith(prefix)}
    kinds = list(rows["target"])
    body = [
        [name, *(f"{rows[name][kind]:.3f}" for kind in kinds)]
        for name in sorted(rows, key=lambda name: rows[name]["all"])
    ]
    return _table(["", *kinds], body)


def tau_table(results: Mapping[str, Any]) -> str:
    """Acceptance lengths: a row per temperature, a column per shape of the tree."""
    rows: dict[str, dict[str, float]] = {}
    for key, value in results.items():
        if key.startswith("tau/"):
            _, temperature, shape = key.split("/", 2)
            rows.setdefault(temperature, {})[shape] = value
    shapes = list(next(iter(rows.values())))
    titles = [shape.replace("=", " ").replace("/", ", ") for shape in shapes]
    body = [[name, *(f"{row[shape]:.2f}" for shape in shapes)] for name, row in rows.items()]
    return _table(["", *titles], body)


def _table(head: list[str], body: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))
