"""The training loop: optax, Orbax checkpoints, a JSONL log, a progress bar.

A step is a pure function of the state and of arrays on the device: its windows and its randomness come from
the seed and the step's number. So a checkpoint is the state alone, and a run that was stopped at any point
goes on exactly as if it had not been.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Float, Int, Key
from tqdm import tqdm

from jetspec_jax.models import Weights
from train.recipes import Fit
from train.stages import Deadline

Metrics = dict[str, Any]


@runtime_checkable
class Loss(Protocol):
    """What is minimised: draws its batch from ``data`` by ``key``."""

    def __call__(self, weights: Weights, data: Any, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        """The loss and what else to log."""
        ...


class TrainState(NamedTuple):
    """All that a run is at some step; the best weights are those of the lowest validation loss so far."""

    step: Int[Array, ""]
    weights: Weights
    optimizer: Any
    best: Weights
    best_loss: Float[Array, ""]


def make_optimizer(fit: Fit) -> optax.GradientTransformation:
    """AdamW with warm-up, a cosine to a tenth, and clipping; vectors (norms) are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, fit.learning_rate, fit.warmup, fit.steps, end_value=0.1 * fit.learning_rate
    )
    return optax.chain(
        optax.clip_by_global_norm(fit.clip),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=fit.weight_decay,
            mask=partial(jax.tree.map, lambda w: w.ndim > 1),
        ),
    )


def train(
    folder: Path,
    fit: Fit,
    loss: Loss,
    weights: Weights,
    data: Any,
    *,
    validate: Callable[[Weights], Mapping[str, Any]],
    seed: int,
    deadline: Deadline,
    label: str,
) -> Weights:
    """Trains, or goes on with what the folder holds, and returns the best weights.

    Args:
        folder: For checkpoints and ``log.jsonl``.
        fit: Steps and rates.
        loss: The objective.
        weights: Initial float32 weights.
        data: Arrays that the objective draws from.
        validate: Metrics of some weights; its "loss" decides which are best.
        seed: Of everything random in the steps.
        deadline: When to stop, after saving.
        label: For the progress bar.

    Raises:
        OutOfTime: The deadline passed; the folder holds where to go on.
        FloatingPointError: A loss is not finite; the last checkpoint before it stays.
    """
    optimizer = make_optimizer(fit)
    root = jax.random.key(seed)

    @partial(jax.jit, donate_argnums=0)
    def advance(state: TrainState, data: Any) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(root, state.step)
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.weights, data, key)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer, state.weights)
        metrics = {"loss": value, "gradient_norm": _norm(gradient), **metrics}
        new = optax.apply_updates(state.weights, updates)
        return state._replace(step=state.step + 1, weights=new, optimizer=optimizer_state), metrics

    weights = jax.tree.map(jnp.asarray, weights)
    copy = jax.tree.map(jnp.copy, weights)  # the state is donated, so no array may be in it twice
    state = TrainState(jnp.int32(0), weights, optimizer.init(weights), copy, jnp.float32(jnp.inf))
    # Checkpoints are written before the loop goes on: small states, and no thread left behind at a stop.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=False)
    with ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options) as manager:
        last = manager.latest_step()
        if last is not None:
            state = manager.restore(last, args=ocp.args.StandardRestore(state))
        log = _Log(folder / "log.jsonl", kept_steps=last or 0)
        bar = tqdm(total=fit.steps, initial=last or 0, desc=label, unit=" steps", mininterval=2)
        with bar:
            for step in range(last or 0, fit.steps):
                state, metrics = advance(state, data)
                log.add(step + 1, metrics)
                done = step + 1
                at_end = done == fit.steps
                if at_end or done % fit.log_every == 0:
                    bar.set_postfix(loss=f"{log.flush():.3f}")
                    bar.update(done - bar.n)
                if at_end or done % fit.evaluate_every == 0:
                    log.flush()
                    state = _keep_best(state, validate(state.weights), log, done)
                stop = deadline.passed() and not at_end
                if at_end or stop or done % fit.save_every == 0:
                    log.flush()
                    manager.save(done, args=ocp.args.StandardSave(state))
                if stop:
                    deadline.stop(f"{label}: step {done} of {fit.steps}")
    return state.best


def _norm(tree: Any) -> Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def _keep_best(state: TrainState, metrics: Mapping[str, Any], log: "_Log", step: int) -> TrainState:
    log.write({"step": step, **{f"validation_{name}": _plain(x) for name, x in metrics.items()}})
    if not metrics["loss"] < state.best_loss:
        return state
    return state._replace(best=jax.tree.map(jnp.copy, state.weights), best_loss=jnp.float32(metrics["loss"]))


class _Log:
    """One JSON object per step, written in batches so that the device is not waited for at every step."""

    def __init__(self, path: Path, *, kept_steps: int):
        # Steps after the last checkpoint are done again, so their records go.
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= kept_steps]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        self.path, self.pending, self.since, self.last = path, [], time.perf_counter(), float("nan")

    def add(self, step: int, metrics: Metrics) -> None:
        self.pending.append((step, metrics))

    def flush(self) -> float:
        """Writes what is pending and returns the newest loss."""
        if not self.pending:
            return self.last
        records = [(step, jax.tree.map(_plain, metrics)) for step, metrics in self.pending]
        now = time.perf_counter()
        seconds = (now - self.since) / len(records)
        for step, record in records:
            if not np.isfinite(record["loss"]):
                raise FloatingPointError(f"the loss is {record['loss']} at step {step}")
            self.write({"step": step, **record, "seconds": round(seconds, 5)})
        self.pending, self.since, self.last = [], now, records[-1][1]["loss"]
        return self.last

    def write(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _plain(x: Any) -> Any:
    return np.asarray(x, np.float64).tolist()
