"""Documents that a target writes from lines of its own corpus: those of the demo pair."""

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
from train.data.tokens import Stream, line_starts
from train.loop.stages import Deadline

# Prompts drawn for each held-out document: some are dropped because a training document begins alike.
DRAWS = 4


class Cuts(NamedTuple):
    """Where documents begin in a corpus, how long their prompts are, and how they are to be continued.

    Attributes:
        stream: The corpus.
        begin: Index of each document's first token.
        prompt: Tokens of each prompt.
        temperature: Of each continuation.
    """

    stream: Stream
    begin: Int[np.ndarray, "n"]
    prompt: Int[np.ndarray, "n"]
    temperature: Float[np.ndarray, "n"]

    def prompts(self, length: int) -> Prompts:
        """Prompts that a target continues to ``length`` tokens; as in pretraining, past a text's end."""
        params = [
            SamplingParams(temperature=float(t), max_tokens=length - int(n), ignore_eos=True)
            for t, n in zip(self.temperature, self.prompt, strict=True)
        ]
        return Prompts(self.prompt_tokens(), params)

    def documents(self, length: int) -> list[Document]:
        """The same prompts with what really follows them; where the corpus ends, so does a document."""
        texts = [self._tokens(int(b), length) for b in self.begin]
        return [Document(text, np.arange(len(text)) >= n) for text, n in zip(texts, self.prompt, strict=True)]

    def prompt_tokens(self) -> list[Int32[np.ndarray, "t"]]:
        """The prompts themselves."""
        return [self._tokens(int(b), int(n)) for b, n in zip(self.begin, self.prompt, strict=True)]

    def _tokens(self, begin: int, count: int) -> Int32[np.ndarray, "t"]:
        return self.stream[begin : begin + count].astype(np.int32)


class SplitCuts(NamedTuple):
    """Cuts for training, and behind them those held out, which come from another stream.

    Attributes:
        train: The first documents.
        held: The last ones.
    """

    train: Cuts
    held: Cuts

    @property
    def held_indices(self) -> range:
        """Which of all documents are held out."""
        first = len(self.train.begin)
        return range(first, first + len(self.held.begin))

    def prompts(self, length: int) -> Prompts:
        """As those of `Cuts`."""
        train, held = self.train.prompts(length), self.held.prompts(length)
        return Prompts([*train.tokens, *held.tokens], [*train.params, *held.params])

    def documents(self, length: int) -> list[Document]:
        """As those of `Cuts`."""
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
        count: How many.
        prompt: Shortest and longest prompt.
        temperatures: Each document is written at one of these.
        seed: Of the choice of all that.

    Raises:
        ValueError: The stream has no line with room for a prompt.
    """
    # One token more, so that a continuation of the corpus's own is never empty.
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
    """Documents of a stream to learn from, and held-out ones of another, which have prompts of their own.

    Args:
        train: The corpus to learn from.
        held: The corpus of the held-out documents.
        newline_ids: Tokens that end a line.
        count: How many documents, those held out included.
        heldout: How many are held out; a prompt that a training document has too is not taken.
        prompt: Shortest and longest prompt.
        temperatures: Each document is written at one of these.
        seed: Of the choice of all that.

    Raises:
        ValueError: A stream has no line with room for a prompt, or the second has too few of its own.
    """
    cut = partial(cut_corpus, newline_ids=newline_ids, prompt=prompt, temperatures=temperatures)
    own = cut(train, count=count - heldout, seed=seed)
    known = {tokens.tobytes() for tokens in own.prompt_tokens()}
    drawn = cut(held, count=DRAWS * heldout, seed=(*seed, 1))
    new = [i for i, tokens in enumerate(drawn.prompt_tokens()) if tokens.tobytes() not in known][:heldout]
    if len(new) < heldout:
        raise ValueError(
            f"of {DRAWS * heldout} prompts for {heldout} held-out documents only {len(new)} are none of the "
            "training documents': make prompts longer, or hold out fewer"
        )
    return SplitCuts(own, Cuts(held, drawn.begin[new], drawn.prompt[new], drawn.temperature[new]))


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
    """A folder of documents that a target wrote from prompts of its corpus; a finished one is left alone.

    Args:
        folder: Where.
        target: Who writes.
        prompts: What to continue.
        name: The target's.
        seed: Of the sampling.
        held: Indices of the documents that are not for training, in order.
        shard_documents: Most documents of a shard.
        slots: Documents written at a time.
        deadline: Checked before a shard is begun.

    Raises:
        OutOfTime: The deadline passed; calling again goes on.
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
    """The tokens of all training documents, which are of one length, and the marks on what the target wrote.

    Raises:
        ValueError: The folder is not finished or damaged, or documents differ in length.
    """
    documents = list(Documents.open(folder))
    return np.stack([d.tokens for d in documents]), np.stack([d.learn for d in documents])
