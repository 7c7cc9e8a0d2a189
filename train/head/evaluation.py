"""Evaluates a draft head during training, on held-out documents: its loss, and its tau in decoding."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.config import DraftHeadConfig
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device.sharding import on_one_device
from jetspec_jax.generation import generate_tree
from jetspec_jax.models import Weights
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import breadth_of
from train.data.documents import Document, Documents
from train.data.holdout import evenly_spaced
from train.data.regenerate import document_seed
from train.data.windows import Windows
from train.head.recipe import HeadEvaluation, HeadRecipe
from train.head.tau import Decoded, tau_record
from train.loop.mesh import put_batch
from train.loop.trainer import Evaluated, mean_of
from train.loss.objectives import Loss
from train.loss.precision import as_shipped

#: Tree algorithms of evaluations: that of the reference implementation, so that figures are comparable; and
#: best-first for heads with a selector, which need it.
ALGORITHM, SELECTOR_ALGORITHM = "accum_logp", "top_nodes"


class HeldOut(NamedTuple):
    """The data of an evaluation.

    Attributes:
        tokens: Windows for the validation loss.
        learn: Whether to learn each of their tokens.
        prompts: Prompts for tau.
        sources: The name of each prompt's source.
    """

    tokens: Int[np.ndarray, "N T"]
    learn: Bool[np.ndarray, "N T"]
    prompts: list[list[int]]
    sources: list[str]

    @classmethod
    def of(cls, documents: Documents, recipe: HeadRecipe, limit: int) -> "HeldOut":
        """Windows and prompts of held-out documents, evenly spread over them.

        Args:
            documents: The held-out documents.
            recipe: The recipe, with the numbers and lengths of windows and prompts.
            limit: Limit on the tokens of a prompt and its completion.

        Raises:
            ValueError: There are no documents, or no prompt is short enough for a completion.
        """
        settings, windows = recipe.evaluation, Windows(documents, recipe.window)
        chosen = [windows[i] for i in evenly_spaced(len(windows), settings.windows)]
        decoded = held_out_prompts(documents, settings, limit - settings.new_tokens, settings.prompts)
        if settings.prompts and not decoded:
            shortest = min(len(prompt_of(each, settings.prompt_tokens)) for each in documents)
            raise ValueError(
                f"none of {len(documents)} held-out prompts leaves room for evaluation.new_tokens "
                f"{settings.new_tokens} in a context of {limit}; the shortest has {shortest} tokens. Ask for "
                "fewer new tokens, or set evaluation.prompts to 0 to measure the loss alone"
            )
        return cls(
            np.stack([window["tokens"] for window in chosen]),
            np.stack([window["learn"] for window in chosen]),
            [*decoded.values()],
            [documents.sources[i] for i in decoded],
        )


class HeadEvaluator:
    """Evaluates a head's weights rounded to their stored dtype, usually bfloat16."""

    def __init__(
        self,
        config: DraftHeadConfig,
        target: Target,
        frozen: Weights,
        loss: Loss,
        settings: HeadEvaluation,
        held: HeldOut,
        *,
        batch: int,
        dtype: jnp.dtype,
        mesh: Mesh,
        seed: int,
        stored: str = "bfloat16",
        fixed: bool = False,
    ):
        """Prepares the validation batches; compiles nothing yet.

        Args:
            target: The target for decoding, on one device or on some devices of this process.
            frozen: The target's weights on the mesh.
            loss: The training loss, evaluated at fixed anchors.
            batch: Windows per batch.
            dtype: Dtype of both forward passes.
            seed: Seed of the anchors and of sampled completions.
            stored: The dtype of saved weights.
            fixed: Whether only the head's selector changes between evaluations.
        """
        self.config, self.target, self.frozen = config, target, frozen
        self.settings, self.held = settings, held
        self.batch, self.dtype, self.mesh = batch, dtype, mesh
        self.key, self.seed = jax.random.key(seed), seed

        def rounded(weights: Weights, frozen: Weights, batch: Any, key: jax.Array) -> Any:
            return loss(as_shipped(weights, dtype, stored), frozen, batch, key)

        self._loss = jax.jit(rounded)
        self._as_shipped = jax.jit(partial(as_shipped, dtype=dtype, stored=stored))
        self._fixed = fixed
        self._without: dict[str, Any] | None = None

    def __call__(self, weights: Weights) -> Evaluated:
        """Validation loss, and tau at every temperature and budget; with a selector also tau without it.

        The score is tau at the first temperature and the largest budget; without prompts it is the negative
        loss.
        """
        with jax.set_mesh(self.mesh):
            means = mean_of(self._loss, weights, self.frozen, self._batches())
        record = {f"validation_{name}": value for name, value in means.items()}
        if not self.held.prompts:
            return Evaluated(record, -means["loss"])
        # Weights that are not finite are for the log to report, which ends the run with its last good step.
        head = Head(self.config, on_one_device(self._as_shipped(weights)), allow_nonfinite=True)
        record |= tau_record(self.decode(head), self.held.sources)
        if self.config.selector is not None:
            if self._without is None or not self._fixed:
                without = tau_record(self.decode(without_selector(head)), self.held.sources)
                self._without = {f"{name}_without": without[name] for name in ("tau", "tau_by_temperature")}
            record |= self._without
        return Evaluated(record, record["tau"][str(max(self.settings.budgets))])

    def decode(self, head: Head) -> Decoded:
        """Completions of the held-out prompts at every temperature and budget; none without prompts.

        Each prompt has its own seed, the same in all evaluations. A head decodes with the same trees with and
        without its selector.
        """
        if not self.held.prompts:
            return {}
        # Always on the same devices, so that all evaluations share one program.
        target, group = self.target, self.target.mesh
        if group is None:
            device = jax.local_devices()[0]
            target = replace(target, weights=jax.device_put(target.weights, device))
            head = replace(head, weights=jax.device_put(head.weights, device))
        elif head.mesh is None:
            head = replace(head, weights=place(head.weights, head.config, group), mesh=group)
        trees = {
            budget: evaluation_trees(self.config, self.settings, budget) for budget in self.settings.budgets
        }
        return {
            temperature: {
                budget: generate_tree(
                    target,
                    head,
                    self.held.prompts,
                    self._sampling(temperature),
                    budget=budget,
                    width=settings.width,
                    algorithm=settings.algorithm,
                    candidates=settings.candidates,
                    max_slots=len(self.held.prompts),
                )
                for budget, settings in trees.items()
            }
            for temperature in self.settings.temperatures
        }

    def _sampling(self, temperature: float) -> list[SamplingParams]:
        return [
            SamplingParams(
                temperature=temperature,
                seed=document_seed((self.seed,), index),
                max_tokens=self.settings.new_tokens,
            )
            for index in range(len(self.held.prompts))
        ]

    def _batches(self) -> Any:
        """Batches of one shape; the last is padded with windows without tokens to learn."""
        count, processes = len(self.held.tokens), jax.process_count()
        for i in range(0, count, self.batch):
            parts = {}
            for name in ("tokens", "learn"):
                part = getattr(self.held, name)[i : i + self.batch]
                part = np.pad(part, ((0, self.batch - len(part)), (0, 0)))
                rows = np.split(part, processes)[jax.process_index()]
                parts[name] = put_batch(rows, self.mesh, axis=0)
            yield parts, jax.random.fold_in(self.key, i)


def evaluation_trees(config: DraftHeadConfig, settings: HeadEvaluation, budget: int) -> TreeSettings:
    """The tree settings of a budget; with a selector, candidates and width are decoding's defaults."""
    if config.selected is None:
        return TreeSettings(budget, settings.width, None, ALGORITHM)
    width, candidates = breadth_of(SELECTOR_ALGORITHM, None, None, config.selected)
    return TreeSettings(budget, width, None, SELECTOR_ALGORITHM, candidates)


def without_selector(head: Head) -> Head:
    """The head without its selector."""
    weights = {name: value for name, value in head.weights.items() if name != "selector"}
    return replace(head, config=replace(head.config, selector=None), weights=weights)


def held_out_prompts(
    documents: Documents, settings: HeadEvaluation, room: int, most: int
) -> dict[int, list[int]]:
    """At most ``most`` prompts of at most ``room`` tokens, by the numbers of their documents."""
    prompts = [prompt_of(documents[i], settings.prompt_tokens) for i in range(len(documents))]
    fitting = [i for i, prompt in enumerate(prompts) if 0 < len(prompt) <= room]
    return {fitting[i]: prompts[fitting[i]] for i in evenly_spaced(len(fitting), most)}


def prompt_of(document: Document, prompt_tokens: int) -> list[int]:
    """The tokens before a document's first token to learn; if there are none, its first tokens."""
    first = int(np.argmax(document.learn))
    if first < 2:
        first = min(prompt_tokens, len(document.tokens) - 1)
    return document.tokens[:first].tolist()
