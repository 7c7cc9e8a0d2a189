"""What XLA makes of a step whose weights are split: they are gathered, the batch is not."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, re, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
import dataclasses
import numpy as np
from jetspec_jax.models import build, weights_of
from jetspec_jax.device.sharding import parameter_shardings
from flax import nnx
import jax.numpy as jnp
from tests.decode.tiny import TINY, head_config
from train.loss.distillation import distillation_loss
from train.loop.fit import Fit
from train.loop.mesh import MeshSettings, make_mesh, spread
from train.loop.trainer import Loop
from train.loss.objectives import Objective

target = dataclasses.replace(TINY, vocab_size=4099)
head = head_config(target, block_size=4)
found = {}
for data, fsdp in ((8, 1), (1, 8)):
    mesh = make_mesh(MeshSettings(data, fsdp))
    loss = distillation_loss(head, target, Objective(anchors=8, chunk=8), jnp.dtype("float32"))
    loop = Loop(Fit(steps=2, batch=16, learning_rate=1e-3, warmup=0), loss, mesh, deterministic=False)
    frozen = spread(weights_of(build(target, rngs=nnx.Rngs(0))), parameter_shardings(target, mesh))
    state = loop.begin(weights_of(build(head, rngs=nnx.Rngs(1))), parameter_shardings(head, mesh), 0)
    batch = {"tokens": np.zeros((16, 32), np.int32), "learn": np.ones((16, 32), bool)}
    with jax.set_mesh(mesh):
        program = loop.step.lower(state, frozen, loop.place(batch)).compile()
    moved = re.findall(r"= \\(?(\\S+) (all-reduce|all-gather|all-to-all|reduce-scatter)", program.as_text())
    found[f"{data}x{fsdp}"] = {
        "temp": program.memory_analysis().temp_size_in_bytes,
        "moved": sorted({f"{kind} {shape}" for shape, kind in moved}),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def programs():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def test_no_logits_move_between_devices(programs):
    moved = programs["1x8"]["moved"]
    assert any(line.startswith("all-gather") for line in moved)
    vocabulary = [line for line in moved if "4099" in line]
    # The two tables of the target alone have the vocabulary as an axis, beside the model's width of 32.
    assert vocabulary
    assert all("[4099,32]" in line for line in vocabulary), vocabulary


def test_a_step_needs_hardly_more_room_than_with_whole_weights(programs):
    # The gathered tables are the larger part of so small a model.
    gathered = 2 * 4099 * 32 * 4
    assert programs["1x8"]["temp"] < 1.2 * programs["8x1"]["temp"] + gathered
