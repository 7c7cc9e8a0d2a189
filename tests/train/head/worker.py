"""Trains tiny heads in a process of its own: ``python -m tests.train.head.worker SETTINGS``, in JSON.

Keys of the settings: "data", the documents' folder; "runs", pairs of a work folder and of changes to the tiny
recipe, of which "mixture" changes the target; and, where need be, "devices", "die" as the name of a place in
`DEATHS`, "process" as ``[index, count, port]``, and "programs", a file for what `step_programs` finds. Each
run leaves ``layout-N.json``, N being the process's number: the shapes of its arrays and of their parts on a
device. A process that is alone leaves its last weights in ``weights.npz``, which are not rounded.
"""

import dataclasses
import json
import os
import re
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tests.processes  # noqa: F401  (programs are compiled as in the tests)
from jetspec_jax.device.sharding import parameter_shardings
from jetspec_jax.models import build, weights_of
from tests.decode.tiny import TINY, head_config, random_target
from tests.train.head.tiny import MIXTURE, RECIPE, changed
from train.head.training import train_head
from train.loop import log
from train.loop.checkpoints import Checkpoints
from train.loop.fit import Fit
from train.loop.mesh import MeshSettings, make_mesh, spread
from train.loop.stages import Deadline
from train.loop.trainer import Loop
from train.loss.distillation import distillation_loss
from train.loss.objectives import Objective

#: Where a process may be killed; the last two write in the background.
DEATHS = {
    "write": (log._Files, "write"),
    "save_best": (Checkpoints, "save_best"),
    "save": (Checkpoints, "save"),
}
#: A prime: no other axis of a step has this length.
VOCABULARY = 4099


def main(settings):
    jax.config.update("jax_num_cpu_devices", settings.get("devices", 1))
    if "process" in settings:
        index, count, port = settings["process"]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    if "die" in settings:
        die_at(*DEATHS[settings["die"]])
    train(settings["data"], settings["runs"])
    if "programs" in settings:
        found = step_programs()
        if jax.process_index() == 0:
            Path(settings["programs"]).write_text(json.dumps(found), encoding="utf-8")


def train(data, runs):
    """Trains one head after the other, and leaves the layout of each one's last step."""
    real, layout, weights = Loop.advance, {}, {}

    def watched(self, state, frozen, batch):
        state, metrics = real(self, state, frozen, batch)
        arrays = {
            "weights": state.weights,
            "optimizer": state.optimizer,
            "frozen": frozen,
            "metrics": metrics,
        }
        layout.clear()
        for path, x in jax.tree_util.tree_flatten_with_path(arrays)[0]:
            layout[jax.tree_util.keystr(path)] = [x.shape, x.sharding.shard_shape(x.shape)]
        layout["programs"] = self.step._cache_size()
        if jax.process_count() == 1:
            leaves = jax.tree_util.tree_flatten_with_path(state.weights)[0]
            weights.update({jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves})
        return state, metrics

    Loop.advance = watched
    try:
        for work, changes in runs:
            changes = dict(changes)
            chosen = random_target(MIXTURE if changes.pop("mixture", False) else TINY, 0)
            weights.clear()
            train_head(Path(work), changed(RECIPE, **changes), chosen, Path(data), Deadline())
            if weights:
                np.savez(Path(work) / "weights.npz", **weights)
            path = Path(work) / f"layout-{jax.process_index()}.json"
            path.write_text(json.dumps(layout), encoding="utf-8")
    finally:
        Loop.advance = real


def die_at(owner, name):
    """Lets the process be killed at the end of the first call."""
    real = getattr(owner, name)

    def dying(*arguments, **keywords):
        real(*arguments, **keywords)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, dying)


def step_programs():
    """Of a step with whole weights, and with split ones: its temporary bytes, and what devices exchange."""
    big = dataclasses.replace(TINY, vocab_size=VOCABULARY)
    head = head_config(big, block_size=4)
    found = {}
    for data, fsdp in ((8, 1), (1, 8)):
        mesh = make_mesh(MeshSettings(data, fsdp))
        loss = distillation_loss(head, big, Objective(anchors=8, chunk=8), jnp.dtype("float32"))
        loop = Loop(Fit(steps=2, batch=16, learning_rate=1e-3, warmup=0), loss, mesh, deterministic=False)
        frozen = spread(weights_of(build(big, rngs=nnx.Rngs(0))), parameter_shardings(big, mesh))
        state = loop.begin(weights_of(build(head, rngs=nnx.Rngs(1))), parameter_shardings(head, mesh), 0)
        rows = 16 // jax.process_count()
        batch = {"tokens": np.zeros((rows, 32), np.int32), "learn": np.ones((rows, 32), bool)}
        with jax.set_mesh(mesh):
            program = loop.step.lower(state, frozen, loop.place(batch)).compile()
        moved = re.findall(r"= \(?(\S+) (all-reduce|all-gather|all-to-all|reduce-scatter)", program.as_text())
        found[f"{data}x{fsdp}"] = {
            "temp": program.memory_analysis().temp_size_in_bytes,
            "moved": sorted({f"{kind} {shape}" for shape, kind in moved}),
        }
    return found


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
