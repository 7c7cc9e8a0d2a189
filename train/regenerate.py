"""Text written by the target: the batched engine continues prompts from the corpus at mixed temperatures."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, UInt16
from tqdm import tqdm

from jetspec_jax.checkpoint import Target
from jetspec_jax.engine import Engine
from jetspec_jax.sampling import SamplingParams
from train.recipes import Recipe
from train.stages import Deadline
from train.tokens import Stream, line_starts


class Regenerated(NamedTuple):
    """Sequences of prompt and continuation.

    Attributes:
        tokens: All of one length.
        first: Index of the first token that the target wrote.
        temperature: At which it wrote.
    """

    tokens: UInt16[np.ndarray, "N T"]
    first: Int[np.ndarray, "N"]
    temperature: np.ndarray


class Writer:
    """Lets a target continue prompts from a corpus, into files that are written once."""

    def __init__(
        self,
        stream: Stream,
        newline_ids: Int[np.ndarray, "n"],
        prompt: tuple[int, int],
        length: int,
        slots: int,
    ):
        """Prepares prompts that begin at lines of the stream.

        Args:
            stream: The corpus.
            newline_ids: Tokens that end a line.
            prompt: Shortest and longest prompt.
            length: Tokens of a text, its prompt included.
            slots: Texts written at a time.

        Raises:
            ValueError: The stream has no line with room for a prompt.
        """
        self.stream, self.prompt, self.length, self.slots = stream, prompt, length, slots
        self._starts = line_starts(stream, newline_ids, before_end=prompt[1])
        if not len(self._starts):
            raise ValueError(f"no line of the corpus has {prompt[1]} tokens after it")

    def write(
        self,
        path: Path,
        target: Target,
        sequences: int,
        temperatures: tuple[float, ...],
        seed: list[int],
        deadline: Deadline,
    ) -> Regenerated:
        """The texts of a file, which are written first if it is not there.

        Args:
            path: The file.
            target: Who writes.
            sequences: How many texts.
            temperatures: Each text is written at one of these.
            seed: Of the prompts, of the choice of temperatures and of the sampling.
            deadline: Checked before anything is written.

        Raises:
            OutOfTime: The deadline passed.
        """
        if not path.exists():
            deadline.check(f"before {path.name}")
            rng = np.random.default_rng(seed)
            begin = rng.choice(self._starts, sequences)
            first = rng.integers(self.prompt[0], self.prompt[1] + 1, sequences)
            prompts = [self.stream[b : b + n].tolist() for b, n in zip(begin, first, strict=True)]
            temperature = rng.choice(temperatures, sequences)
            seeds = rng.integers(2**63, size=sequences)
            params = [
                SamplingParams(
                    temperature=float(temperature[i]),
                    seed=int(seeds[i]),
                    max_tokens=self.length - len(prompt),
                    # As in pretraining, the next document begins in the same window.
                    ignore_eos=True,
                )
                for i, prompt in enumerate(prompts)
            ]
            tokens = self._continue(target, prompts, params)
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            with partial.open("wb") as file:
                np.savez(file, tokens=tokens, first=first.astype(np.int32), temperature=temperature)
            partial.rename(path)
        with np.load(path) as file:
            return Regenerated(file["tokens"], file["first"], file["temperature"])

    def _continue(
        self, target: Target, prompts: list[list[int]], params: list[SamplingParams]
    ) -> UInt16[np.ndarray, "N T"]:
        # Only ids are wanted. Slots as long as a text keep attention from walking pages that stay empty.
        engine = Engine(replace(target, tokenizer=None), slots=self.slots, capacity=self.length)
        requests = engine.complete(prompts, params)
        rows = [p + r.output.token_ids for p, r in zip(prompts, requests, strict=True)]
        return np.asarray(rows, np.uint16)


def regenerate(
    folder: Path,
    recipe: Recipe,
    target: Target,
    stream: Stream,
    newline_ids: Int[np.ndarray, "n"],
    deadline: Deadline,
) -> Regenerated:
    """All shards of a recipe, of which those that are missing are written first.

    Raises:
        OutOfTime: The deadline passed; calling again writes the others.
        ValueError: The stream has no line with room for a prompt.
    """
    settings = recipe.regeneration
    writer = Writer(stream, newline_ids, settings.prompt, settings.length, settings.slots)
    shards = [
        writer.write(
            folder / f"shard-{shard:03d}.npz",
            target,
            settings.sequences,
            settings.temperatures,
            [recipe.seed, shard],
            deadline,
        )
        for shard in tqdm(range(settings.shards), desc="regenerate", unit=" shards")
    ]
    return Regenerated(*(np.concatenate(parts) for parts in zip(*shards, strict=True)))
