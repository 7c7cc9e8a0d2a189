"""``python -m bench train``: one optimiser step of a draft head's training, and its share of the matmul rate.

The step is the trainer's: the target's forward, blocks at random anchors, the loss, its gradient and AdamW,
on random weights and tokens. Its operations are counted from the shapes (see `step_work`). Rematerialised
work does not count, nor does a head that several devices compute alike, so the share is that of useful
operations.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bench.common.floors import measure_ceilings
from bench.common.kernel_trace import kernel_tables, summarise, trace_kernels
from bench.common.options import add_program_arguments, add_switch, check_least
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.scene import random_weights
from bench.common.shapes import FEATURES, SHAPES, PairShape, find_pair_shape, parameters
from bench.common.timing import compile_seconds, median, on_gpu, peak_bytes, seconds_of
from bench.common.training_batch import make_batch
from jetspec_jax import enable_compilation_cache
from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.cli.options import Group, Option
from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.partition import check_partition
from jetspec_jax.device.peers import say_apart
from jetspec_jax.device.sharding import parameter_shardings
from jetspec_jax.models import Weights
from jetspec_jax.progress import Progress
from train.loop.fit import Fit
from train.loop.log import COUNTED
from train.loop.mesh import MeshSettings, batch_parts, make_mesh, one_device, shares_target
from train.loop.trainer import Loop
from train.loss.distillation import distillation_loss
from train.loss.objectives import LOSSES, Objective

#: The recipe's settings mesh.data and so on.
MESH = Group(
    "devices: one by default, all if one of these is given",
    MeshSettings,
    (
        Option(
            "data",
            "copies of the head; -1 is as many as the devices allow",
            int,
            flag="--data-parallel-size",
            former_names=("--data-parallel",),
        ),
        Option(
            "fsdp",
            "shards of a copy's weights and optimiser, which compute other sequences",
            int,
        ),
        Option(
            "expert",
            "groups of the target's routed experts, each on other devices",
            int,
            flag="--expert-parallel-size",
            former_names=("--expert-parallel",),
        ),
        Option(
            "tensor",
            "shards of the target's features; times --expert-parallel-size devices share the target",
            int,
            flag="--tensor-parallel-size",
            former_names=("--tensor-parallel",),
        ),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    add(
        "--shape",
        help=f"shape of the random weights: {', '.join(SHAPES)} (default: qwen3-8b on a GPU, else tiny)",
    )
    add("--window", type=int, help="tokens per sequence (default: 2048 on a GPU, else 64)")
    add("--anchors", type=int, help="blocks per sequence (default: 512 on a GPU, else 8)")
    add("--batch", type=int, default=2, help="sequences per step, on all devices together (default: 2)")
    add(
        "--document-tokens",
        type=int,
        metavar="N",
        help="mean length of documents, a quarter of each its prompt (default: a window without a prompt)",
    )
    add_switch(parser, "--packing", "let documents share windows")
    add("--loss", default="forward_kl", choices=LOSSES)
    add(
        "--chunk",
        type=int,
        default=1024,
        help="draft rows of a sequence whose logits are in memory at once (default: 1024)",
    )
    add_switch(parser, "--remat", "rematerialise the head's layers in the backward pass")
    add("--steps", type=int, default=10, help="timed steps (default: 10)")
    MESH.add(parser)
    add_program_arguments(parser)
    add_report_arguments(parser, "train", picture=False)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the JSON."""
    check_least(arguments, 1, "window", "anchors", "batch", "chunk", "steps")
    name, window, anchors = ("qwen3-8b", 2048, 512) if on_gpu() else ("tiny", 64, 8)
    name, window, anchors = arguments.shape or name, arguments.window or window, arguments.anchors or anchors
    # The report has the defaults, too.
    arguments.shape, arguments.window, arguments.anchors = name, window, anchors
    shape, dtype = find_pair_shape(name), resolve_dtype(arguments.dtype)
    if window < shape.head.block_size:
        raise ValueError(f"a block of {shape.head.block_size} slots does not fit a window of {window} tokens")
    made = make_batch(
        arguments.batch,
        window,
        shape.target.vocab_size,
        document_tokens=arguments.document_tokens,
        packing=arguments.packing,
    )
    check_report(arguments)
    enable_compilation_cache(arguments.compilation_cache)

    given = MESH.given(arguments)
    mesh = make_mesh(MeshSettings(**given)) if given else one_device()
    say_apart((mesh,))
    objective = Objective(loss=arguments.loss, anchors=anchors, chunk=arguments.chunk)
    loss = distillation_loss(shape.head, shape.target, objective, dtype, remat=arguments.remat)
    # With a learning rate of 0 the weights stay random, and the optimiser does all of its work.
    fit = Fit(steps=1_000_000, batch=arguments.batch, learning_rate=0.0, warmup=0)
    loop = Loop(fit, loss, mesh, deterministic=False)
    frozen = _frozen(shape, dtype, mesh)
    placed = parameter_shardings(shape.head, mesh)
    head = random_weights(shape.head, jnp.dtype(jnp.float32), seed=1, placed=placed)
    state = loop.begin(head, placed, seed=0)
    del head
    batch = made.arrays
    with Progress(total=3 + arguments.steps + arguments.profile, unit="step") as bar:
        bar.set_description("compile")
        # As in `Loop.advance`.
        with jax.set_mesh(mesh):
            compiling, program = compile_seconds(loop.step, state, frozen, loop.place(batch))
        bar.update()
        state, metrics = program(state, frozen, loop.place(batch))
        bar.update()
        seconds = []
        for _ in range(arguments.steps):
            bar.set_description("steps")
            elapsed, (state, metrics) = seconds_of(program, state, frozen, loop.place(batch))
            seconds.append(elapsed)
            bar.update()
        kernels = []
        if arguments.profile:
            bar.set_description("profile")
            kernels = trace_kernels(lambda: program(state, frozen, loop.place(batch)))
            bar.update()
        peaks = [peak_bytes(device) for device in mesh.devices.flat]
        del state, frozen, program
        bar.set_description("ceilings")
        ceilings = measure_ceilings(dtype, 5)
        bar.update()
    value = float(metrics["loss"])
    if not np.isfinite(value):
        raise RuntimeError(f"the loss is {value}")

    work = step_work(shape, window, anchors, arguments.batch, made.span)
    step, operations = median(seconds), sum(work.values())
    counts = {name: int(metrics[name]) for name in COUNTED}
    report = {
        **opening_of("train", arguments),
        "shape": name,
        "dtype": str(dtype),
        "loss": arguments.loss,
        "window": window,
        "anchors": anchors,
        "devices": mesh.size,
        "mesh": dict(mesh.shape),
        "batch": arguments.batch,
        # Devices that share the target compute the same sequences.
        "batch_per_device": arguments.batch // batch_parts(mesh),
        # The last step's loss: equal on any devices except for rounding, unless KV heads are repeated.
        "loss_value": value,
        "chunk": arguments.chunk,
        "remat": arguments.remat,
        "compile_seconds": compiling,
        "step_seconds": step,
        "steps_seconds": seconds,
        "document_tokens": arguments.document_tokens,
        "packing": arguments.packing,
        "documents": len(made.lengths),
        **counts,
        "tokens_per_second": arguments.batch * window / step,
        **{f"{name}_per_second": count / step for name, count in counts.items()},
        "draft_slots_per_second": arguments.batch * anchors * shape.head.depth / step,
        "operations": work,
        "operations_per_second": operations / step,
        "matmul_rate": ceilings.matmul,
        "share_of_matmul_rate": operations / step / (ceilings.matmul * mesh.size),
        "peak_memory_bytes": max(filter(None, peaks), default=None),
        "peak_memory_bytes_of_devices": peaks,
        "profile": summarise(kernels, 1) if kernels else None,
    }
    tables = [
        (f"{_title(report)}, {describe_mesh(mesh)}", [_row(report)]),
        ("operations of a step", [{k: f"{v / 1e12:.1f} T" for k, v in work.items()}]),
    ]
    if kernels:
        tables += kernel_tables(report["profile"], "a step")
    publish(arguments, report, tables)
    return 0


def _frozen(shape: PairShape, dtype: jnp.dtype, mesh: Mesh) -> Weights:
    """A random target with the layout of `train.head.frozen.freeze`; devices make only their shards.

    Raises:
        ValueError: The mesh does not divide the target.
    """
    if shares_target(mesh):
        check_partition(shape.target, mesh)
        return random_weights(shape.target, dtype, 0, mesh)
    return random_weights(shape.target, dtype, 0, placed=parameter_shardings(shape.target, mesh))


def step_work(shape: PairShape, window: int, anchors: int, batch: int, span: int) -> dict[str, int]:
    """The least floating-point operations of a step, by part.

    Padding counts like tokens. ``span`` is the mean length of a token's document.

    A product counts once for the forward pass, and once each for the gradients of its input and of its weight
    if they are needed: the target and its output table are frozen, and taps have no gradient. Attention
    counts only unmasked pairs. Norms, softmax, the loss and the optimiser are left out.
    """
    target, head = shape.target, shape.head
    table = target.vocab_size * target.hidden_size
    body = parameters(target) - table * (1 if target.tie_word_embeddings else 2)
    tokens, rows = batch * window, batch * anchors * head.block_size
    drafts = batch * anchors * head.depth
    features = parameters(head, FEATURES)
    layers = parameters(head) - features
    projections = head.layers.hidden_size * sum(layer.kv_size for layer in head.layers.layers)
    head_scores, target_scores = (
        sum(4 * layer.num_heads * layer.head_dim for layer in model.layers) for model in (head.layers, target)
    )
    return {
        "target": 2 * tokens * body + target_scores * tokens * span // 2,
        # For all tokens, or for the drafted rows if there are fewer.
        "teacher logits": 2 * min(tokens, drafts) * table,
        "head layers": 3 * 2 * rows * layers,
        "head context": 2 * 2 * tokens * features + 3 * 2 * tokens * projections,
        "head attention": 3 * head_scores * rows * (span + head.block_size) // 2,
        "draft logits": 2 * 2 * drafts * table,
    }


def _title(report: dict[str, Any]) -> str:
    documents = ""
    if report["document_tokens"]:
        kind = "packed" if report["packing"] else "not packed"
        documents = f" of documents of {report['document_tokens']}, {kind}"
    return (
        f"training step of the head of {report['shape']}: {report['batch']} x {report['window']} tokens"
        f"{documents}, "
        f"{report['anchors']} anchors, {report['loss']}, {measured_on(report)}"
    )


def _row(report: dict[str, Any]) -> dict[str, Any]:
    peak = report["peak_memory_bytes"]
    return {
        "sequences per device": report["batch_per_device"],
        "step ms": 1e3 * report["step_seconds"],
        "window tokens/s": round(report["tokens_per_second"]),
        "real": round(report["real_tokens_per_second"]),
        "learnable": round(report["learnable_tokens_per_second"]),
        "distinct anchors/s": round(report["distinct_anchors_per_second"]),
        "TFLOP/s": report["operations_per_second"] / 1e12,
        "matmul TFLOP/s": report["devices"] * report["matmul_rate"] / 1e12,
        "share %": 100 * report["share_of_matmul_rate"],
        "peak GiB": float("nan") if peak is None else peak / 2**30,
        "compile s": report["compile_seconds"],
    }
