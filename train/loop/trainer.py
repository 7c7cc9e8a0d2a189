"""The training loop: a jitted step over a mesh, checkpoints, a log, a progress bar.

A step depends only on the state and a batch; its random key is derived from the state's key and the step's
number. A checkpoint holds the state and the position in the data, so a resumed run has the same results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, UInt32

from jetspec_jax.device.processes import agreed
from jetspec_jax.models import Weights
from jetspec_jax.progress import Progress
from train.loop.checkpoints import Best, Checkpoints, placed_shapes
from train.loop.fit import Fit, make_optimizer, schedule
from train.loop.log import TrainingLog
from train.loop.mesh import batch_parts, one_device, put_batch, replicated, spread
from train.loop.stages import Deadline, OutOfTime
from train.loss.objectives import Count, Loss, Means
from train.trackers.tracker import Tracker


class TrainState(NamedTuple):
    """All arrays of a run at some step.

    Attributes:
        step: Steps done.
        key: The random key of the run, as raw data for checkpoints.
        weights: float32 master weights.
        optimizer: The optimiser's state.
    """

    step: Int[Array, ""]
    key: UInt32[Array, "_"]
    weights: Weights
    optimizer: Any


class Evaluated(NamedTuple):
    """An evaluation of weights on held-out data.

    Attributes:
        record: The record for the log.
        score: The score that chooses the best weights; higher is better.
    """

    record: Mapping[str, Any]
    score: float


class Trained(NamedTuple):
    """A finished run.

    Attributes:
        weights: The best weights, after ``keep``.
        step: The step of their evaluation.
        score: Their score.
    """

    weights: Weights
    step: int
    score: float


def train(
    folder: Path,
    fit: Fit,
    loss: Loss,
    weights: Weights,
    *,
    frozen: Any,
    batches: "grain.DatasetIterator[Any]",
    evaluate: Callable[[Weights], Evaluated],
    seed: int,
    deadline: Deadline,
    label: str,
    mesh: Mesh | None = None,
    shardings: Any = None,
    deterministic: bool = False,
    tokens_per_step: int = 0,
    evaluate_first: bool = False,
    keep: Callable[[Weights], Weights] = lambda weights: weights,
    watch: Callable[[], None] = lambda: None,
    trackers: Callable[[], Sequence[Tracker]] = tuple,
) -> Trained:
    """Trains, or resumes the run in the folder.

    Args:
        folder: The folder of checkpoints, the log and its TensorBoard files.
        weights: Initial float32 weights; they are donated.
        frozen: Frozen arrays that the loss reads; with a mesh, placed on it.
        batches: This process's parts of the batches: NumPy arrays with a leading axis of sequences.
        deadline: When to stop, after saving.
        mesh: The devices; None is one.
        shardings: The weights' shardings on the mesh; None replicates them.
        deterministic: Whether a GPU must be bitwise reproducible.
        tokens_per_step: Tokens of the windows, including padding, for the log.
        evaluate_first: Whether to evaluate the initial weights, which may then remain the best.
        keep: Converts the best weights for ``best/`` and for the result.
        watch: Called in the first process after the log has steps and a new evaluation.
        trackers: Opens trackers besides TensorBoard; called in the first process.

    Raises:
        OutOfTime: The deadline passed; the same call resumes.
        NonFiniteLoss: A loss is not finite; the last checkpoint before it stays.
        TrainingCheckpointError: A checkpoint could not be written (the previous one is intact); or all
            existing checkpoints are damaged.
        ValueError: The batch does not divide over the devices, or a setting is out of range.
    """
    mesh = mesh or one_device()
    loop = Loop(fit, loss, mesh, deterministic)
    main = jax.process_index() == 0
    shardings = jax.tree.map(lambda _: replicated(mesh), weights) if shardings is None else shardings
    state = loop.begin(weights, shardings, seed)
    kept = placed_shapes(keep(state.weights))
    with Checkpoints(folder) as checkpoints:
        first, state, host, best = checkpoints.restore(state)
        if first:
            batches.set_state(host["data"])
        bar = Progress(
            total=fit.steps, initial=first, desc=label, unit=" steps", mininterval=2, disable=not main
        )
        # A run without a checkpoint starts from scratch, with a new log and a new evaluation of step 0.
        with TrainingLog(folder, kept_steps=first or -1, main=main, trackers=trackers) as log, bar:

            def evaluated(step: int, best: Best) -> Best:
                """Evaluates the weights, and returns the best so far."""
                with log.paused():
                    bar.set_description(f"{label}, evaluating")
                    record, score = evaluate(state.weights)
                    bar.set_description(label)
                    log.write("evaluation", step, record)
                    if main and step:
                        watch()
                    if not agreed(bool(score > best.score), "whether weights are the best"):
                        return best
                    checkpoints.save_best(Best(step, score), keep(state.weights))
                    return Best(step, score)

            if evaluate_first and not first:
                best = evaluated(0, best)
            bar.set_postfix_str("compiling")
            for done in range(first + 1, fit.steps + 1):
                state, metrics = loop.advance(state, frozen, next(batches))
                if done == first + 1:
                    bar.set_postfix_str("")
                log.add(done, metrics, tokens_per_step)
                at_end = done == fit.steps
                if at_end or done % fit.log_every == 0:
                    bar.set_postfix(loss=f"{log.flush():.3f}")
                    bar.update(done - bar.n)
                if at_end or done % fit.evaluate_every == 0:
                    best = evaluated(done, best)
                # Processes synchronise to agree, so only at steps whose log is written, which wait anyway.
                asks = not at_end and (jax.process_count() == 1 or done % fit.log_every == 0)
                stop = asks and agreed(deadline.passed(), "the time limit")
                if at_end or stop or done % fit.save_every == 0:
                    log.flush()
                    checkpoints.save(done, state, {"data": batches.get_state()})
                if stop:
                    raise OutOfTime(f"{label}: step {done} of {fit.steps}")
        if (found := checkpoints.restore_best(kept)) is None:
            raise ValueError(f"{label}: no evaluation gave a score, so no weights are best")
        best, weights = found
        return Trained(weights, best.step, best.score)


def compiler_options(deterministic: bool) -> dict[str, bool | int] | None:
    """XLA's compiler options for bitwise reproducible programs if ``deterministic``, else None."""
    if not deterministic or jax.default_backend() != "gpu":
        return None
    # Reductions in a fixed order, and no autotuning.
    return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}


class Loop:
    """The jitted step of a run, and the placement of its state and batches on a mesh.

    Attributes:
        step: The jitted step, set by `begin`: a function of state, which it donates, frozen arrays and batch.
    """

    step: Any

    def __init__(self, fit: Fit, loss: Loss, mesh: Mesh, deterministic: bool):
        """Compiles nothing yet; ValueError if the batch does not divide over the mesh."""
        self.fit, self.loss, self.mesh, self.parts = fit, loss, mesh, fit.parts(batch_parts(mesh))
        self.optimizer = make_optimizer(fit)
        self.options = compiler_options(deterministic)

    def begin(self, weights: Weights, shardings: Any, seed: int) -> TrainState:
        """The state before the first step; the optimiser's moments have the weights' shardings.

        The weights become part of the state, which the first step donates.
        """
        whole = replicated(self.mesh)
        weights = spread(weights, shardings)
        shapes = jax.eval_shape(self.optimizer.init, weights)
        placed = optax.tree_map_params(
            self.optimizer, lambda _, s: s, shapes, shardings, transform_non_params=lambda _: whole
        )
        optimizer = jax.jit(self.optimizer.init, out_shardings=placed)(weights)
        step, key = jax.device_put((np.int32(0), jax.random.key_data(jax.random.key(seed))), whole)
        state = TrainState(step, key, weights, optimizer)
        # With other shardings the second step would compile again.
        self.step = jax.jit(
            self._step,
            donate_argnums=0,
            out_shardings=(jax.tree.map(lambda x: x.sharding, state), whole),
            compiler_options=self.options,
        )
        return state

    def advance(self, state: TrainState, frozen: Any, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        """One step over this process's part of a batch; the state is donated."""
        # Kernels that cannot be sharded detect the mesh and fall back to XLA.
        with jax.set_mesh(self.mesh):
            return self.step(state, frozen, self.place(batch))

    def place(self, batch: Any) -> Any:
        """A batch in micro-batches, ``[parts, B, ...]``, each sharded over the mesh."""

        def put(x: np.ndarray) -> jax.Array:
            count = x.shape[0] // self.parts
            return put_batch(x.reshape(self.parts, count, *x.shape[1:]), self.mesh, axis=1)

        return jax.tree.map(put, batch)

    def _step(self, state: TrainState, frozen: Any, batch: Any) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        keys = jax.random.split(key, self.parts)

        def total(weights: Weights, batch: Any, key: Key[Array, ""]) -> tuple[Float[Array, ""], Means]:
            means = self.loss(weights, frozen, batch, key)
            return means["loss"].total, means

        def part(batch: Any, key: Key[Array, ""]) -> tuple[Means, Weights]:
            (_, means), gradient = jax.value_and_grad(total, has_aux=True)(state.weights, batch, key)
            return means, gradient

        first = jax.tree.map(lambda x: x[0], (batch, keys))
        if self.parts == 1:
            means, gradient = part(*first)
        else:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, *first))
            added = jax.lax.scan(lambda sums, x: (_add(sums, part(*x)), None), zeros, (batch, keys))
            means, gradient = added[0]
        weight = jnp.maximum(means["loss"].weight, jnp.finfo(jnp.float32).tiny)
        gradient = jax.tree.map(lambda g: g / weight, gradient)
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.weights)
        metrics = {name: mean.value() for name, mean in means.items()}
        metrics["gradient_norm"] = optax.tree.norm(gradient)
        metrics["learning_rate"] = schedule(self.fit)(state.step)
        weights: Any = optax.apply_updates(state.weights, updates)
        return TrainState(state.step + 1, state.key, weights, optimizer), metrics


def mean_of(loss: Loss, weights: Weights, frozen: Any, batches: Iterator[tuple[Any, Any]]) -> dict[str, Any]:
    """Means of a loss over (batch, key) pairs, as plain numbers and lists, without the counts."""
    sums: Any = None
    for batch, key in batches:
        means = loss(weights, frozen, batch, key)
        sums = means if sums is None else _add(sums, means)
    return {
        name: np.asarray(mean.value(), np.float64).tolist()
        for name, mean in sums.items()
        if not isinstance(mean, Count)
    }


def _add(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)
