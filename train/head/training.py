"""Trains a draft head from a recipe, a target and a folder of documents, and writes a checkpoint.

The work folder holds ``recipe.json``, ``checkpoints/`` and ``best/``, ``log.jsonl`` and ``tensorboard/``, on
demand ``target_states/`` and ``trackers.json``, ``training.png``, which is drawn while the run goes on, and
at the end ``draft_head/`` (Hugging Face layout) and ``evaluation.json``.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.checkpoint.loading import Head, Target, read_draft_head
from jetspec_jax.checkpoint.source import Source, resolve_dtype
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import DraftHeadConfig, DraftScales, check_head_fits
from jetspec_jax.device.peers import say_apart
from jetspec_jax.device.processes import in_turn, is_first
from jetspec_jax.device.sharding import on_one_device, parameter_shardings
from jetspec_jax.models import Weights
from train.data.documents import Documents
from train.data.holdout import evenly_spaced
from train.data.loader import AHEAD, batches
from train.data.manifest import HELDOUT, TRAIN
from train.data.windows import Windows, check_enough
from train.head.calibrate import calibrate
from train.head.engines import published_json
from train.head.evaluation import HeadEvaluator, HeldOut, evaluation_trees, held_out_prompts
from train.head.frozen import Frozen, freeze
from train.head.recipe import HeadRecipe
from train.head.selector import trainee_of
from train.head.start import Beginning, begin_head
from train.head.target_states import TargetStates
from train.head.tau import by_budget, tau_record
from train.loop.mesh import batch_parts, make_mesh, put_batch
from train.loop.plot import LivePicture, plot_training
from train.loop.stages import Deadline, claim, dotted, fresh
from train.loop.trainer import Trained, compiler_options, train
from train.loss.distillation import target_states
from train.trackers.opening import UNTRACKED, Tracking

#: Batches to read ahead if they contain target states: each may need a GiB of host memory or more.
STATES_AHEAD = 2


def train_head(
    work: Path,
    recipe: HeadRecipe,
    target: Target,
    data: Path,
    deadline: Deadline,
    *,
    checkpoint: Source | None = None,
    label: str = "head",
    tracking: Tracking = UNTRACKED,
    states_gib: float | None = None,
) -> Path:
    """Trains a draft head, or resumes the run of the folder, and returns the finished head's folder.

    Args:
        target: The target, loaded in the recipe's dtype onto one device, or onto `mesh_to_load`.
        data: A finished folder of documents.
        checkpoint: The initial head, for recipes that start from one. The trained head keeps its config,
            including ignored keys.
        tracking: Trackers besides TensorBoard; they receive the recipe and the figures of the log.
        states_gib: Most GiB of the target's states, which are then computed once and kept in the work folder;
            None computes them in every step.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
        FileNotFoundError: There are no documents, or no such checkpoint.
        ValueError: The folder was begun with other settings; recipe, target, documents and devices do not
            fit together; a tracker is unknown or not installed; or the target's states are larger than their
            bound or than the free disk.
        RuntimeError: A tracker refuses the run.
        NonFiniteLoss: The loss is not finite; the last checkpoint before it stays.
        TrainingCheckpointError: A checkpoint could not be written (the previous one is intact); or all
            existing checkpoints are damaged.
    """
    recipe.check()
    tracking.check()
    documents, held = Documents.open(data, TRAIN), Documents.open(data, HELDOUT)
    if documents.settings.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"{documents.folder} was made for a vocabulary of {documents.settings.vocab_size}, the target's "
            f"has {target.config.vocab_size}"
        )
    mesh = make_mesh(recipe.mesh)
    say_apart((mesh,))
    frozen = freeze(target, mesh)
    target = frozen.decoding
    beginning = begin_head(target, recipe.head, checkpoint, recipe.seed, recipe.selector)
    check_head_fits(beginning.config, target.config)
    if beginning.config.block_size > recipe.window:
        raise ValueError(
            f"a block of {beginning.config.block_size} slots does not fit a window of {recipe.window} tokens"
        )
    if recipe.evaluation.prompts:
        for budget in recipe.evaluation.budgets:
            trees = evaluation_trees(beginning.config, recipe.evaluation, budget)
            trees.check(target.config, beginning.config.depth)
    windows = Windows(documents, recipe.window, recipe.seed if recipe.packing else None)
    check_enough(windows, recipe.fit.batch)
    run = _HeadRun(work, recipe, frozen, mesh, beginning, held)
    folder, mark = work / "draft_head", work / "evaluation.json"
    finished, states = mark.exists() and folder.is_dir(), None
    if states_gib is not None and not finished:
        states = run.target_states(windows)
        print(f"{label}: {states.check(states_gib)}", flush=True)
    # After all checks, because a claimed folder accepts no other recipe.
    with in_turn("a work folder"):
        claim(
            work,
            {
                **asdict(recipe),
                "begins_as": beginning.raw,
                "begins_with": fingerprint(beginning.weights),
                "stored": beginning.stored,
                "data": documents.settings.plain(),
                "target": asdict(target.config),
                "target_weights": fingerprint(target.weights),
            },
        )
    if finished:
        return folder
    if is_first():
        print(f"{label}: {windows.contents}", flush=True)
        if recipe.selector is not None and not recipe.selector.joint:
            print(f"{label}: only the selector learns; selector.joint=true trains the head too", flush=True)
    if states is not None:
        states.make(run.compute_states, run.evaluator.batch, deadline)
    trained = run.train(windows if states is None else states, deadline, label, tracking)
    weights = on_one_device(trained.weights)
    with in_turn("a finished head") as first:
        if first:
            # The initial head's config may lack the target's depth.
            config = replace(beginning.config, num_target_layers=target.config.num_layers)
            raw = published_json(beginning.raw, config)
            ignored = () if checkpoint is None else checkpoint.ignore_config_keys

            def saved(config: DraftHeadConfig) -> Head:
                save_checkpoint(fresh(folder), raw, weights, dtype=beginning.stored, config=config)
                return read_draft_head(Source(folder, recipe.dtype, ignored), target)

            head = saved(config)
            plot_training(work / "log.jsonl", work / "training.png", label)
            if (scales := run.draft_scales(head, held)) is not None:
                raw["dflash_config"]["draft_scales"] = scales
                head = saved(replace(config, draft_scales=scales))
            # Written last: its presence marks the run as finished.
            write_json(mark, run.final_evaluation(head, trained))
    return folder


def fingerprint(weights: Weights) -> str:
    """A hash of the first numbers of every parameter, which differs for other weights of the same shapes.

    For sharded weights, the numbers are from the first device's shards.
    """
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(weights):
        first = leaf.addressable_shards[0].data
        digest.update(np.asarray(first.ravel()[:64].astype(jnp.float32)).tobytes())
    return digest.hexdigest()[:16]


class _HeadRun:
    """The objects of a training run, placed on its mesh."""

    def __init__(
        self,
        work: Path,
        recipe: HeadRecipe,
        frozen: Frozen,
        mesh: Mesh,
        beginning: Beginning,
        held: Documents,
    ):
        self.work, self.recipe, self.mesh, self.beginning = work, recipe, mesh, beginning
        self.frozen, target = frozen
        dtype = resolve_dtype(recipe.dtype)
        parts = recipe.fit.parts(batch_parts(mesh))
        self.trainee = trainee_of(beginning, recipe, target.config, self.frozen, mesh, dtype)
        self.assemble = jax.jit(
            self.trainee.assemble, out_shardings=parameter_shardings(beginning.config, mesh)
        )
        self.states = jax.jit(
            target_states(beginning.config, target.config, dtype),
            compiler_options=compiler_options(recipe.deterministic),
        )
        self.evaluator = HeadEvaluator(
            beginning.config,
            target,
            self.frozen,
            self.trainee.head_loss,
            recipe.evaluation,
            HeldOut.of(held, recipe, target.config.max_position_embeddings),
            batch=recipe.fit.batch // parts,
            dtype=dtype,
            mesh=self.mesh,
            seed=recipe.seed + 1,
            stored=beginning.stored,
            fixed=recipe.selector is not None and not recipe.selector.joint,
        )

    def head(self, weights: Weights) -> Weights:
        """The head's weights from the trained parameters."""
        return self.assemble(weights, self.trainee.frozen)

    def target_states(self, windows: Windows) -> TargetStates:
        """The cache of the target's states of all windows; computes nothing yet."""
        config, target = self.beginning.config, self.evaluator.target.config
        width = target.hidden_size * (1 + len(config.tap_layers))
        return TargetStates(self.work / "target_states", windows, width, np.dtype(self.evaluator.dtype))

    def compute_states(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The states of a batch of windows."""
        read = ("tokens", "starts")
        with jax.set_mesh(self.mesh):
            placed = {name: put_batch(x, self.mesh, axis=0) for name, x in batch.items() if name in read}
            return np.asarray(self.states(self.frozen, placed))

    def train(
        self, windows: Windows | TargetStates, deadline: Deadline, label: str, tracking: Tracking
    ) -> Trained:
        recipe, processes = self.recipe, jax.process_count()
        if recipe.fit.batch % processes:
            raise ValueError(f"a batch of {recipe.fit.batch} does not divide over {processes} processes")
        source = batches(
            windows,
            recipe.fit.batch // processes,
            recipe.seed,
            process_index=jax.process_index(),
            process_count=processes,
            ahead=STATES_AHEAD if isinstance(windows, TargetStates) else AHEAD,
        )
        try:
            return train(
                self.work,
                recipe.fit,
                self.trainee.loss,
                self.trainee.weights,
                frozen=self.trainee.frozen,
                batches=source,
                evaluate=lambda weights: self.evaluator(self.head(weights)),
                seed=recipe.seed,
                deadline=deadline,
                label=label,
                mesh=self.mesh,
                shardings=self.trainee.shardings,
                deterministic=recipe.deterministic,
                tokens_per_step=recipe.fit.batch * recipe.window,
                # A fine-tuned head must not become worse than it was.
                evaluate_first=recipe.head.start != "random",
                keep=self.head,
                watch=LivePicture(self.work / "log.jsonl", self.work / "training.png", label),
                trackers=lambda: tracking.open(self.work, dotted(asdict(recipe))),
            )
        finally:
            source.close()

    def draft_scales(self, head: Head, held: Documents) -> DraftScales | None:
        """The scales of the finished head's errors; None if the recipe fits none."""
        settings, target = self.recipe.calibration, self.evaluator.target
        if settings is None:
            return None
        room = target.config.max_position_embeddings - settings.max_tokens - head.config.depth
        every = held_out_prompts(held, self.recipe.evaluation, room, len(held)).values()
        # Those of the evaluation measure the finished head.
        measured = {tuple(prompt) for prompt in self.evaluator.held.prompts}
        prompts = [prompt for prompt in every if tuple(prompt) not in measured] or [*every]
        prompts = [prompts[i] for i in evenly_spaced(len(prompts), settings.prompts)]
        if not prompts:
            raise ValueError(
                f"no held-out prompt leaves room for calibration.max_tokens {settings.max_tokens}: set less"
            )
        temperatures = sorted(settings.temperatures)
        # Without a deadline: other processes wait for this one, which alone would stop.
        how = {"max_tokens": settings.max_tokens, "batch": len(prompts), "deadline": Deadline()}
        return calibrate(self.work / "calibrate", target, head, prompts, temperatures, **how)

    def final_evaluation(self, head: Head, trained: Trained) -> dict[str, Any]:
        """Tau of the saved head, loaded from its folder, on the held-out prompts."""
        held, decoded = self.evaluator.held, self.evaluator.decode(head)
        prompts = []
        for i, (tokens, source) in enumerate(zip(held.prompts, held.sources, strict=True)):
            tau = by_budget(decoded, [i])
            first = next(iter(tau.values()))
            prompts.append({"token_ids": tokens, "source": source, "tau": first, "tau_by_temperature": tau})
        return {
            "best_step": trained.step,
            "score": trained.score,
            **(tau_record(decoded, held.sources) if held.prompts else {"tau": {}}),
            "new_tokens": self.recipe.evaluation.new_tokens,
            "width": evaluation_trees(self.beginning.config, self.recipe.evaluation, 1).width,
            "prompts": prompts,
        }
