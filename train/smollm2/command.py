"""``python -m train smollm2``: the draft head of SmolLM2, from its prompts to a checkpoint, stage by stage.

The work folder holds ``written/`` (prompts that the target wrote as a user), ``prompts.jsonl`` and
``prompts.json`` (all prompts, and the number dropped for each reason), ``answers/`` (the training documents)
and ``head/`` (the training; at the end ``head/draft_head``).
"""

import argparse
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.checkpoint.files import write_json, write_text
from jetspec_jax.checkpoint.loading import Target, read_target
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.smollm2 import SMOLLM2 as NAME
from train.data.documents import Documents, Writer
from train.data.holdout import hold_out
from train.data.prompt_filters import RUN, Evaluated, UserPrompt, without_overlap
from train.data.prompt_sets import mt_bench_turns, set_rows
from train.data.prompts import MESSAGES, Entry, read_rows
from train.data.regenerate import Prompts, regenerate, regeneration_settings
from train.data.rendering import Encoder
from train.head.frozen import mesh_to_load
from train.head.recipe_file import add_set_option, read_head_recipe
from train.head.training import train_head
from train.loop.stages import Deadline, claim, run_stages
from train.smollm2.prompts import gsm8k_questions, read_written, to_write
from train.smollm2.recipe import SMOLLM2, SmolLM2Recipe

#: The evaluated sets, and the texts of their rows that training prompts must not overlap with.
EVALUATED = {
    "gsm8k": lambda row: [row["question"]],
    "humaneval": lambda row: [row["prompt"]],
    "mt-bench": mt_bench_turns,
}


def add_command(commands: Any) -> None:
    """Adds the command line."""
    parser = commands.add_parser(NAME, help="make the draft head of SmolLM2", description=__doc__)
    parser.set_defaults(run=_run)
    parser.add_argument("--work", type=Path, required=True, help="folder for everything made")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        metavar="FILE",
        help="GSM8K's training split, JSONL (default: from the hub, with the datasets extra)",
    )
    parser.add_argument(
        "--evaluated",
        nargs="+",
        default=[],
        metavar="SET=FILE",
        help=f"files of the evaluated sets {', '.join(EVALUATED)}, JSONL (default: each from the hub)",
    )
    add_set_option(parser, "the head's")
    parser.add_argument(
        "--minutes", type=float, help="stop cleanly after so many minutes; run again to resume"
    )


def _run(arguments: argparse.Namespace) -> int:
    recipe = SMOLLM2
    if arguments.set:
        recipe = replace(recipe, head=read_head_recipe(NAME, arguments.set))
    folder = make_head(
        recipe,
        arguments.work,
        gsm8k=arguments.gsm8k,
        evaluated=_files(arguments.evaluated),
        minutes=arguments.minutes,
    )
    print(f"the head is in {folder}")
    return 0


def make_head(
    recipe: SmolLM2Recipe,
    work: Path,
    *,
    gsm8k: Path | None = None,
    evaluated: Mapping[str, Path] | None = None,
    minutes: float | None = None,
) -> Path:
    """Runs the stages of a recipe that are not done; returns the head's folder.

    Args:
        recipe: The recipe.
        work: The folder for everything that is made.
        gsm8k: GSM8K's training split as JSONL; None fetches it from the hub.
        evaluated: Files of evaluated sets by name; other sets are fetched from the hub.
        minutes: Time after which the run saves and stops.

    Raises:
        OutOfTime: The limit was reached; the same call resumes.
        FileNotFoundError: The target is not installed, or a set cannot be loaded.
        ValueError: The folder has another recipe, or a row is invalid.
    """
    claim(work, asdict(recipe))
    made = _Head(recipe, work, gsm8k, evaluated or {}, Deadline(minutes))
    stages = {
        "sets": made.sets_stage,
        "written": made.written_stage,
        "prompts": made.prompts_stage,
        "answers": made.answers_stage,
        "head": made.head_stage,
    }
    run_stages(work, stages, made.deadline)
    return work / "head" / "draft_head"


class _Head:
    """The stages and their shared state, which is loaded on first use."""

    def __init__(
        self,
        recipe: SmolLM2Recipe,
        work: Path,
        gsm8k: Path | None,
        evaluated: Mapping[str, Path],
        deadline: Deadline,
    ):
        self.recipe, self.work, self.deadline = recipe, work, deadline
        self.gsm8k, self.evaluated = gsm8k, evaluated

    @functools.cached_property
    def target(self) -> Target:
        return read_target(Source(NAME, self.recipe.head.dtype), mesh_to_load(self.recipe.head.mesh))

    @functools.cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.target.tokenizer, self.target.eos_token_ids)

    @functools.cached_property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """The rows of GSM8K's training split."""
        return set_rows("gsm8k", self.gsm8k, split="train")

    @functools.cached_property
    def runs(self) -> Evaluated:
        """Runs of words of all evaluated sets."""
        found = []
        for name, texts in EVALUATED.items():
            for row in set_rows(name, self.evaluated.get(name)):
                found += texts(row)
        return Evaluated(found)

    def sets_stage(self) -> None:
        """Reads all sets, so that a missing set is an error before anything is decoded."""
        print(f"  {len(self.rows):,} questions; {', '.join(EVALUATED)}: {self.runs.count:,} runs", flush=True)

    def written_stage(self) -> None:
        """Lets the target write prompts as a user."""
        prompts = to_write(self.target.tokenizer, self.recipe.writing)
        self._regenerate("written", prompts, (self.recipe.seed,), held=(), sources=None)

    def prompts_stage(self) -> None:
        """Writes the prompts that are kept, from GSM8K and from the target, in a random order."""
        recipe, rng = self.recipe, np.random.default_rng([self.recipe.seed, 1])
        documents = Documents.open(self.work / "written")
        tokenizer, end_ids = self.target.tokenizer, self.target.eos_token_ids
        written, faulty = read_written(documents, tokenizer, end_ids, recipe.writing)
        questions = gsm8k_questions(self.rows, recipe.questions, rng)
        kept, overlapping = without_overlap([*questions, *written], self.runs)
        rows = [self._row(prompt, place) for place, prompt in enumerate(_by_kind(kept))]
        order = rng.permutation(len(rows))
        lines = [json.dumps(rows[i], ensure_ascii=False) + "\n" for i in order]
        write_text(self.work / "prompts.jsonl", "".join(lines))
        counts = {
            "kept": Counter(f"{prompt.kind} {prompt.form}".strip() for prompt in kept),
            "dropped": {f"{kind}: {reason}": n for (kind, reason), n in (faulty + overlapping).items()},
            "run": RUN,
        }
        write_json(self.work / "prompts.json", counts)
        print(f"  {json.dumps(counts)}", flush=True)

    def answers_stage(self) -> None:
        """The target's answers, some greedy and some sampled."""
        rows = read_rows(self.work / "prompts.jsonl")
        tokens = [
            self.encoder.prompt(Entry(f"prompt {number}", MESSAGES, row["messages"]))
            for number, row in enumerate(rows)
        ]
        params = [
            SamplingParams(temperature=row["temperature"], max_tokens=self.recipe.max_tokens) for row in rows
        ]
        held = hold_out([ids.tobytes() for ids in tokens], self.recipe.heldout)
        kinds = [row["kind"] for row in rows]
        self._regenerate("answers", Prompts(tokens, params), (self.recipe.seed, 2), held, kinds)

    def head_stage(self) -> None:
        """The head's training."""
        train_head(self.work / "head", self.recipe.head, self.target, self.work / "answers", self.deadline)

    def _row(self, prompt: UserPrompt, place: int) -> dict[str, Any]:
        temperatures = self.recipe.temperatures
        return {
            "messages": [{"role": "user", "content": prompt.text}],
            "kind": prompt.kind,
            "form": prompt.form,
            "temperature": temperatures[place % len(temperatures)],
        }

    def _regenerate(
        self,
        name: str,
        prompts: Prompts,
        seed: Sequence[int],
        held: Sequence[int],
        sources: Sequence[str] | None,
    ) -> None:
        settings = regeneration_settings(
            prompts,
            target=NAME,
            vocab_size=self.target.config.vocab_size,
            dtype=str(self.target.weights["embed_tokens"].dtype),
            seed=seed,
            source=name,
            heldout=len(held),
            shard_documents=self.recipe.shard_documents,
        )
        writer = Writer(self.work / name, settings, held, sources)
        regenerate(writer, self.target, prompts, slots=self.recipe.slots, deadline=self.deadline)


def _by_kind(prompts: Sequence[UserPrompt]) -> list[UserPrompt]:
    """Prompts sorted by kind and form, so that temperatures alternate within each."""
    return sorted(prompts, key=lambda prompt: (prompt.kind, prompt.form))


def _files(options: Sequence[str]) -> dict[str, Path]:
    files = {}
    for text in options:
        name, equals, path = text.partition("=")
        if name not in EVALUATED or not equals:
            raise ValueError(f"--evaluated takes SET=FILE for the sets {', '.join(EVALUATED)}, not {text!r}")
        files[name] = Path(path)
    return files
