"""Measures a finished pair on held-out modules; the results are kept as JSON, and each is measured once."""

import bz2
import gzip
import json
import lzma
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.config import ModelConfig
from jetspec_jax.generation import generate, generate_tree
from jetspec_jax.models import Weights
from jetspec_jax.sampling.params import SamplingParams
from train.data.manifest import HELDOUT, TRAIN
from train.demo.corpus import LIBRARY, TESTS, CorpusFile
from train.demo.ngram import NGram
from train.demo.recipes import PairEvaluation, PairRecipe
from train.demo.target import token_losses
from train.demo.tokenizer import END_OF_TEXT, Tokenizer
from train.demo.tokens import concatenate, encode_split, line_starts
from train.head.evaluation import ALGORITHM
from train.head.tau import mean_tau
from train.loop.stages import Deadline

NGRAM_ORDER = 5
COMPRESSORS: Mapping[str, Callable[[bytes], bytes]] = {
    "gzip": partial(gzip.compress, compresslevel=9),
    "bz2": partial(bz2.compress, compresslevel=9),
    "xz": partial(lzma.compress, preset=9 | lzma.PRESET_EXTREME),
}
#: Windows scored at a time.
BATCH = 8


class Results:
    """A JSON file of measured parts; a part in the file is not measured again."""

    def __init__(self, path: Path, deadline: Deadline):
        """Opens a file or begins a new one."""
        self.path, self.deadline = path, deadline
        self.parts: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Measures a part unless the file holds it.

        Raises:
            OutOfTime: The time limit was reached.
        """
        if name not in self.parts:
            self.deadline.check(f"evaluate: before {name}")
            self.parts[name] = measure()
            write_json(self.path, self.parts)
            print(f"  {name}: {self.parts[name]}", flush=True)
        return self.parts[name]


def evaluate(
    path: Path,
    recipe: PairRecipe,
    target: Target,
    head: Head,
    tokenizer: Tokenizer,
    sources: Mapping[CorpusFile, str],
    deadline: Deadline,
) -> dict[str, Any]:
    """Measures the parts that the file at ``path`` lacks, and returns all parts.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
    """
    results, settings = Results(path, deadline), recipe.evaluation
    device = jax.devices()[0]
    results.part("device", lambda: f"{device.device_kind}, JAX {jax.__version__}")
    results.part("dtype", lambda: str(jax.tree.leaves(target.weights)[0].dtype))
    held = {
        kind: [text for s, text in sources.items() if (s.split, s.kind) == (HELDOUT, kind)]
        for kind in (LIBRARY, TESTS)
    }
    results.part("heldout_bytes", lambda: {k: sum(map(_size, held[k])) for k in held})
    for name, compress in COMPRESSORS.items():
        results.part(f"bits_per_byte/{name}", partial(_by_kind, partial(_compressed, compress), held))
    results.part(
        f"bits_per_byte/{NGRAM_ORDER}-gram over tokens",
        lambda: _by_kind(_ngram_bits(tokenizer, sources), held),
    )
    score = partial(target_bits, target, tokenizer, window=recipe.target_window, stride=settings.stride)
    results.part("bits_per_byte/target", lambda: _by_kind(score, held))

    prompts, truth = heldout_prompts(recipe, tokenizer, sources)
    greedy = SamplingParams(max_tokens=settings.new_tokens, ignore_eos=True)
    results.part("repetition/held-out text", lambda: repetition(truth, settings.ngram))
    results.part(
        "repetition/greedy text",
        lambda: repetition(
            [c.token_ids for c in generate(target, prompts, greedy, max_slots=len(prompts))],
            settings.ngram,
        ),
    )
    shapes = [
        (settings.chain_budget, 1),
        *((budget, settings.width) for budget in settings.budgets),
    ]
    for temperature in (0.0, 1.0):
        for budget, width in shapes:
            results.part(
                f"tau/T={temperature:g}/budget={budget}/width={width}",
                partial(tau, target, head, prompts, settings, temperature, budget, width),
            )
    return results.parts


def target_bits(target: Target, tokenizer: Tokenizer, texts: list[str], *, window: int, stride: int) -> float:
    """Total bits of some texts under a target, each text after an end-of-text token.

    Windows advance by ``stride``: each token has at least ``window - stride`` tokens of context, or all
    earlier tokens of its text.
    """
    end = tokenizer.id_of(END_OF_TEXT)
    rows, masks = [], []
    for ids in tokenizer.encode_all(texts):
        document = np.asarray([end, *ids], np.int32)
        for first in range(1, len(document), stride):
            last = min(first + stride, len(document))
            begin = max(last - window - 1, 0)
            row = document[begin:last]
            mask = np.zeros(window, bool)
            mask[first - begin - 1 : last - begin - 1] = True
            rows.append(np.pad(row, (0, window + 1 - len(row)), constant_values=end))
            masks.append(mask)
    rows += [np.full(window + 1, end, np.int32)] * (-len(rows) % BATCH)
    masks += [np.zeros(window, bool)] * (-len(masks) % BATCH)

    total = 0.0
    for i in range(0, len(rows), BATCH):
        part = slice(i, i + BATCH)
        total += float(_nats(target.config, target.weights, np.stack(rows[part]), np.stack(masks[part])))
    return total / math.log(2)


@partial(jax.jit, static_argnums=0)
def _nats(
    config: ModelConfig, weights: Weights, tokens: Int[Array, "B T"], mask: Bool[Array, "B T-1"]
) -> Float[Array, ""]:
    """Sum of the losses of the tokens that the mask marks."""
    return jnp.sum(jnp.where(mask, token_losses(config, weights, tokens), 0.0))


def heldout_prompts(
    recipe: PairRecipe, tokenizer: Tokenizer, sources: Mapping[CorpusFile, str]
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that begin at random lines of held-out modules, and the tokens that follow them there."""
    settings = recipe.evaluation
    rows, starts = _heldout_rows(recipe, tokenizer, sources)
    chosen = np.random.default_rng([recipe.seed, 7]).choice(len(starts), settings.prompts, replace=False)
    texts = [rows(start) for start in starts[chosen].tolist()]
    return [r[: settings.prompt_tokens] for r in texts], [r[settings.prompt_tokens :] for r in texts]


def prompt_texts(recipe: PairRecipe, tokenizer: Tokenizer, sources: Mapping[CorpusFile, str]) -> list[str]:
    """The texts of `heldout_prompts`, and more distinct texts of the same kind up to ``kept_prompts``."""
    settings = recipe.evaluation
    measured, _ = heldout_prompts(recipe, tokenizer, sources)
    texts = [tokenizer.decode(prompt) for prompt in measured]
    rows, starts = _heldout_rows(recipe, tokenizer, sources)
    for start in np.random.default_rng([recipe.seed, 8]).permutation(starts).tolist():
        if len(texts) >= settings.kept_prompts:
            break
        # Library code is in the stream more than once, so texts repeat.
        text = tokenizer.decode(rows(start)[: settings.prompt_tokens])
        if text not in texts:
            texts.append(text)
    return texts


def _heldout_rows(
    recipe: PairRecipe, tokenizer: Tokenizer, sources: Mapping[CorpusFile, str]
) -> tuple[Callable[[int], list[int]], Int[np.ndarray, "n"]]:
    """A function that gives a prompt with its continuation, and the places where one may begin."""
    total = recipe.evaluation.prompt_tokens + recipe.evaluation.new_tokens
    stream = encode_split(tokenizer, sources, HELDOUT, library_repeats=recipe.library_repeats)
    starts = line_starts(stream, tokenizer.newline_ids(), before_end=total)
    return lambda start: stream[start : start + total].tolist(), starts


def tau(
    target: Target,
    head: Head,
    prompts: list[list[int]],
    settings: PairEvaluation,
    temperature: float,
    budget: int,
    width: int,
) -> float:
    """Mean tokens committed per round, over all rounds of all prompts."""
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=settings.new_tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    completions = generate_tree(
        target,
        head,
        prompts,
        params,
        budget=budget,
        width=width,
        algorithm=ALGORITHM,
        max_slots=len(prompts),
    )
    return round(mean_tau(completions), 3)


def repetition(texts: list[list[int]], n: int) -> float:
    """Share of n-token runs that occurred before in the same text; near 1 is a loop."""
    runs = repeated = 0
    for text in texts:
        grams = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
        runs += len(grams)
        repeated += len(grams) - len(set(grams))
    return round(repeated / max(runs, 1), 4)


def _by_kind(bits: Callable[[list[str]], float], held: Mapping[str, list[str]]) -> dict[str, float]:
    """Bits per byte of the held-out texts of each kind, and of all."""
    kinds = {kind: texts for kind, texts in held.items() if texts}
    counted = {kind: bits(texts) for kind, texts in kinds.items()}
    sizes = {kind: sum(map(_size, texts)) for kind, texts in kinds.items()}
    rates = {kind: counted[kind] / sizes[kind] for kind in kinds}
    rates["all"] = sum(counted.values()) / sum(sizes.values())
    return {kind: round(rate, 4) for kind, rate in rates.items()}


def _compressed(compress: Callable[[bytes], bytes], texts: list[str]) -> float:
    return 8.0 * len(compress("".join(texts).encode()))


def _ngram_bits(tokenizer: Tokenizer, sources: Mapping[CorpusFile, str]) -> Callable[[list[str]], float]:
    """Bits of the n-gram model, which has the target's tokenizer and training split."""
    end = tokenizer.id_of(END_OF_TEXT)
    stream = encode_split(tokenizer, sources, TRAIN).astype(np.int64)
    model = NGram(stream, order=NGRAM_ORDER, vocab_size=tokenizer.vocab_size)

    def bits(texts: list[str]) -> float:
        held = concatenate(tokenizer.encode_all(texts), end).astype(np.int64)
        return float(np.sum(model.bits(held)[held != end]))

    return bits


def _size(text: str) -> int:
    return len(text.encode())
