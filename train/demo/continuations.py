"""Documents that begin at lines of a corpus, continued by a target or by the corpus itself."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.sampling.params import SamplingParams
from train.data.documents import Documents, Writer
from train.data.records import Document
from train.data.regenerate import Prompts, regenerate, regeneration_settings
from train.demo.tokens import Stream, line_starts
from train.loop.stages import Deadline

# Prompts drawn for each held-out document; prompts of training documents are dropped.
DRAWS = 4


class Cuts(NamedTuple):
    """Documents cut from a corpus: where they begin, their prompts' lengths and sampling temperatures.

    Attributes:
        stream: The corpus.
        begin: Index of each document's first token.
        prompt: Tokens of each prompt.
        temperature: Sampling temperature of each continuation.
    """

    stream: Stream
    begin: Int[np.ndarray, "n"]
    prompt: Int[np.ndarray, "n"]
    temperature: Float[np.ndarray, "n"]

    def prompts(self, length: int) -> Prompts:
        """Prompts that a target continues to ``length`` tokens, past a text's end as in pretraining."""
        params = [
            SamplingParams(temperature=float(t), max_tokens=length - int(n), ignore_eos=True)
            for t, n in zip(self.temperature, self.prompt, strict=True)
        ]
        return Prompts(self.prompt_tokens(), params)

    def documents(self, length: int) -> list[Document]:
        """The same prompts with the corpus's own continuation; a document ends where the corpus does."""
        texts = [self._tokens(int(b), length) for b in self.begin]
        return [Document(text, np.arange(len(text)) >= n) for text, n in zip(texts, self.prompt, strict=True)]

    def prompt_tokens(self) -> list[Int32[np.ndarray, "t"]]:
        """Token ids of the prompts."""
        return [self._tokens(int(b), int(n)) for b, n in zip(self.begin, self.prompt, strict=True)]

    def _tokens(self, begin: int, count: int) -> Int32[np.ndarray, "t"]:
        return self.stream[begin : begin + count].astype(np.int32)


class SplitCuts(NamedTuple):
    """Cuts for training and, after them, held-out cuts from another stream.

    Attributes:
        train: The first documents.
        held: The last ones.
    """

    train: Cuts
    held: Cuts

    @property
    def held_indices(self) -> range:
        """Indices of the held-out documents among all documents."""
        first = len(self.train.begin)
        return range(first, first + len(self.held.begin))

    def prompts(self, length: int) -> Prompts:
        """As by `Cuts`, the training documents first."""
        train, held = self.train.prompts(length), self.held.prompts(length)
        return Prompts([*train.tokens, *held.tokens], [*train.params, *held.params])

    def documents(self, length: int) -> list[Document]:
        """As by `Cuts`, the training documents first."""
        return self.train.documents(length) + self.held.documents(length)


def cut_corpus(
    stream: Stream,
    newline_ids: Int[np.ndarray, "n"],
    *,
    count: int,
    prompt: tuple[int, int],
    temperatures: Sequence[float],
    seed: Sequence[int],
) -> Cuts:
    """Documents that begin at random lines of a corpus.

    Args:
        stream: The corpus.
        newline_ids: Tokens that end a line.
        count: Number of documents.
        prompt: Shortest and longest prompt.
        temperatures: Each document gets one of these.
        seed: Seed of all these choices.

    Raises:
        ValueError: The stream has no line with room for a prompt.
    """
    # One more token, so that the corpus's own continuation is never empty.
    starts = line_starts(stream, newline_ids, before_end=prompt[1] + 1)
    if not len(starts):
        raise ValueError(f"no line of the corpus has {prompt[1] + 1} tokens after it")
    rng = np.random.default_rng(list(seed))
    begin = rng.choice(starts, count)
    sizes = rng.integers(prompt[0], prompt[1] + 1, count)
    return Cuts(stream, begin, sizes, rng.choice(temperatures, count).astype(np.float64))


def cut_splits(
    train: Stream,
    held: Stream,
    newline_ids: Int[np.ndarray, "n"],
    *,
    count: int,
    heldout: int,
    prompt: tuple[int, int],
    temperatures: Sequence[float],
    seed: Sequence[int],
) -> SplitCuts:
    """Training documents from one stream, and held-out documents with other prompts from another.

    Args:
        train: The stream of the training documents.
        held: The stream of the held-out documents.
        newline_ids: Tokens that end a line.
        count: Number of documents, the held-out ones included.
        heldout: Number of held-out documents; prompts of training documents are not taken.
        prompt: Shortest and longest prompt.
        temperatures: Each document gets one of these.
        seed: Seed of all these choices.

    Raises:
        ValueError: A stream has no line with room for a prompt, or the second has too few other prompts.
    """
    cut = partial(cut_corpus, newline_ids=newline_ids, prompt=prompt, temperatures=temperatures)
    training = cut(train, count=count - heldout, seed=seed)
    known = {tokens.tobytes() for tokens in training.prompt_tokens()}
    drawn = cut(held, count=DRAWS * heldout, seed=(*seed, 1))
    new = [i for i, tokens in enumerate(drawn.prompt_tokens()) if tokens.tobytes() not in known][:heldout]
    if len(new) < heldout:
        raise ValueError(
            f"of {DRAWS * heldout} prompts for {heldout} held-out documents only {len(new)} are none of the "
            "training documents': make prompts longer, or hold out fewer"
        )
    return SplitCuts(training, Cuts(held, drawn.begin[new], drawn.prompt[new], drawn.temperature[new]))


def continue_corpus(
    folder: Path,
    target: Target,
    prompts: Prompts,
    *,
    name: str,
    seed: Sequence[int],
    held: Sequence[int],
    shard_documents: int,
    slots: int,
    deadline: Deadline,
) -> None:
    """Makes a folder of documents that a target generates from prompts; a finished folder is not changed.

    Args:
        folder: The folder.
        target: The target.
        prompts: The prompts to continue.
        name: The target's name.
        seed: Seed of the sampling.
        held: Indices of the held-out documents, in order.
        shard_documents: Most documents of a shard.
        slots: Documents generated at a time.
        deadline: Checked before a shard is begun.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
        ValueError: The folder was begun with other settings.
    """
    settings = regeneration_settings(
        prompts,
        target=name,
        vocab_size=target.config.vocab_size,
        dtype=str(target.weights["embed_tokens"].dtype),
        seed=seed,
        source="lines of the corpus",
        heldout=len(held),
        shard_documents=shard_documents,
    )
    regenerate(Writer(folder, settings, held), target, prompts, slots=slots, deadline=deadline)


def read_rows(folder: Path) -> tuple[Int32[np.ndarray, "N T"], Bool[np.ndarray, "N T"]]:
    """Tokens of all training documents, which have equal lengths, and whether the target wrote each.

    Raises:
        ValueError: The folder is unfinished or damaged, or documents differ in length.
    """
    documents = list(Documents.open(folder))
    return np.stack([d.tokens for d in documents]), np.stack([d.learn for d in documents])
