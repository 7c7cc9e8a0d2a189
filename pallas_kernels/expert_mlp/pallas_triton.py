"""Experts on Pallas's Triton backend: nothing sorted, weights read once for a block of rows.

At a tree's few rows the experts' weights are all that takes time, so they set the programs:

    program (c, g)  =  columns c of the expert of group g, for all rows of that expert

Groups are experts; or, where there are fewer rows than experts and for a lone token, rows, and the first row
of an expert stands for all of them. A program's rows are gathered and multiplied a block at a time, and every
block reads the program's columns of the weights again. As a rule an expert's rows are one block, so every
weight is read once; `config` says how large blocks are, and that of many tokens an expert has several.

The first launch finds the rows of each group, in the ids of all tokens: in the other programs it would
take registers, of which the number of programs at a time depends. The second launch makes `hidden`, the third
the weighted outputs of every row; where weights want rows of another type or order, XLA makes these before
each. None writes rows without an expert, and the sum over a token's experts skips them.

Shapes: T tokens, K experts of each, R = T * K rows, E experts, M model, I features of an expert.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.activation import Activation, kernel_swish
from pallas_kernels.expert_mlp.config import Config, config_for
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import Quantized
from pallas_kernels.weight_tiles import (
    Lanes,
    Steps,
    Tiles,
    both,
    load,
    multiply,
    parts_of,
    place_of,
    row_group_of,
    rows_for,
    stored_of,
    unsupported,
)
from pallas_kernels.weights import Narrow

# Most tokens that are looked at together.
_CHUNK = 256


def problem_of(gate_up: Array | Narrow, down: Array | Narrow) -> str | None:
    """Why the kernels cannot do a call of `api.expert_mlp`; None if they can."""
    for name, w in (("gate_up", gate_up), ("down", down)):
        if isinstance(w, Mxfp4) and w.axis != 1:
            return f"{name}'s blocks do not lie along the axis that is summed over"
        block = w.block[1] if isinstance(w, Quantized) else 1
        if problem := unsupported(w, block, w.shape[1], w.shape[-1]):
            return f"{name}: {problem}"
    return None


@functools.partial(jax.jit, static_argnames=("activation", "config", "interpret"))
def expert_mlp(
    x: Float[Array, "T M"],
    gate_up: Float[Array, "E M 2 I"] | Narrow,
    down: Float[Array, "E I M"] | Narrow,
    experts: Int32[Array, "T K"],
    weights: Float32[Array, "T K"],
    gate_up_bias: Float[Array, "E 2 I"] | None,
    down_bias: Float[Array, "E M"] | None,
    *,
    activation: Activation,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T M"]:
    """See `api.expert_mlp`. `config` overrides the rule's; `interpret` runs without a GPU."""
    (tokens, top_k), (num_experts, features, size) = experts.shape, down.shape
    gate_up_stored, down_stored = _Stored.of(gate_up), _Stored.of(down)
    if config is None:
        same = gate_up_stored.format == down_stored.format
        config = config_for(
            stored=gate_up_stored.format if same else "plain",
            tokens=tokens,
            top_k=top_k,
            experts=num_experts,
            size=size,
            features=features,
            itemsize=x.dtype.itemsize,
        )
    call = _Call(
        tokens=tokens,
        top_k=top_k,
        experts=num_experts,
        config=config,
        # Tensor cores would round float32 to TF32.
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
    )

    def launch(name: str, kernel: Callable[..., None], grid: tuple[int, ...], *shapes: Any) -> Any:
        return pl.pallas_call(
            functools.partial(kernel, call),
            out_shape=shapes,
            grid=grid,
            compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
            interpret=interpret,
            name=name,
        )

    def product(name: str, kernel: Callable[..., None], columns: int, block: int, dtype: Any) -> Any:
        shape = jax.ShapeDtypeStruct((experts.size, columns), dtype)
        return launch(name, kernel, (pl.cdiv(columns, block), call.groups), shape)

    # A lone token's experts have a row each.
    table = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((call.groups, 2), (call.groups, tokens + 1))]
    groups = (
        (experts,) * 2 if tokens == 1 else launch("expert_mlp_rows", _rows, (call.groups,), *table)(experts)
    )
    hide = functools.partial(_hidden, activation, gate_up_stored, functools.partial(place_of, down))
    hidden_launch = product("expert_mlp_hidden", hide, features, config.block_features, x.dtype)
    [hidden] = hidden_launch(*groups, rows_for(gate_up, x, in_float16=True), gate_up_bias, *parts_of(gate_up))
    give = functools.partial(_output, down_stored)
    output_launch = product("expert_mlp_output", give, size, config.block_model, jnp.float32)
    hidden = hidden if isinstance(down, Mxfp4) else rows_for(down, hidden, in_float16=True)
    [rows] = output_launch(*groups, hidden, down_bias, weights.reshape(-1), *parts_of(down))
    rows = rows.reshape(tokens, top_k, size)
    known = (experts >= 0) & (experts < num_experts)
    return jnp.sum(jnp.where(known[:, :, None], rows, 0), axis=1).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class _Stored:
    """How a matrix of all experts is stored: the static side of `Tiles`."""

    format: str
    terms: int
    columns: int
    blocks: tuple[int, int]  # of FP8: terms and columns that share a scale
    row_group: int | None  # see `Quantized`

    @classmethod
    def of(cls, w: Array | Narrow) -> "_Stored":
        blocks = (w.block[1], w.block[-1]) if isinstance(w, Quantized) else (1, 1)
        return cls(stored_of(w), w.shape[1], w.shape[-1], blocks, row_group_of(w))

    def steps(self, depth: int, rows: int) -> Steps:
        """The steps of a product of so many rows."""
        run = self.blocks[0] if self.format.startswith("fp8") and self.blocks[0] < self.terms else 0
        return Steps.of(self.format, self.terms, depth, rows, run, self.row_group)

    def tiles(
        self, refs: tuple[Any, ...], steps: Steps, block: int, place: Array, e: Array, *half: int
    ) -> Tiles:
        """The columns at a place of the matrix of an expert; of gate and up one half."""
        terms, columns = self.blocks
        return Tiles(
            refs,
            steps,
            self.columns,
            block,
            place,
            (lambda term, column: (e, *half, column, term))
            if self.format == "mxfp4"
            else (lambda term, column: (e, term, *half, column)),
            lambda term: term // terms,
            lambda column: column // columns,
            columns if columns < self.columns else 0,
        )


@dataclass(frozen=True, slots=True)
class _Call:
    """The static side of a launch."""

    tokens: int  # T
    top_k: int  # K
    experts: int  # E
    config: Config
    precision: jax.lax.Precision | None

    @property
    def groups(self) -> int:
        """Programs for the same columns."""
        # The groups of a lone token are its rows, also of experts that lie elsewhere.
        return self.top_k if self.tokens == 1 else min(self.tokens * self.top_k, self.experts)

    @property
    def chunk(self) -> int:
        """Tokens that are looked at together."""
        return min(pl.next_power_of_2(self.tokens), _CHUNK)


def _rows(call: _Call, experts_ref: Any, groups_ref: Any, rows_ref: Any) -> None:
    """One program: the expert of a group and the number of its rows, and the rows."""
    group = pl.program_id(0)
    e = _expert(call, experts_ref)

    # If the second, fourth and fifth token have chosen e, chosen is 0 1 0 1 1 and place 0 0 1 1 2.
    def add(chunk: Array, before: Array) -> Array:
        chosen, row = _rows_of(call, experts_ref, e, chunk)
        place = before + jnp.cumsum(chosen) - chosen
        # Others go to the last place, for the interpreter writes back what a mask keeps it from writing.
        place = jnp.where(chosen == 1, place, call.tokens)
        plgpu.store(rows_ref.at[group, place], row, mask=chosen == 1)
        return before + jnp.sum(chosen)

    count = jax.lax.fori_loop(0, pl.cdiv(call.tokens, call.chunk), add, jnp.int32(0))
    pair = jnp.arange(2, dtype=jnp.int32)
    plgpu.store(groups_ref.at[group, pair], jnp.where(pair == 0, e, count))


def _hidden(
    activation: Activation,
    stored: _Stored,
    place_of: Callable[[Array], Array],
    call: _Call,
    groups_ref: Any,
    rows_ref: Any,
    x_ref: Any,
    bias_ref: Any,
    *refs: Any,
) -> None:
    """One program: some features of one expert's rows."""
    *gate_up, hidden_ref = refs
    place, block = pl.program_id(0), call.config.block_features
    steps = stored.steps(call.config.block_depth, call.config.block_rows)
    features = Lanes.of(place, block, stored.columns)

    def compute(e: Array, row: Array, real: Array) -> None:
        mine = Lanes(row // call.top_k, real)
        tiles = [stored.tiles(tuple(gate_up), steps, block, place, e, half) for half in (0, 1)]
        halves = multiply(x_ref, mine, tiles, 0, steps.count, call.precision)
        if bias_ref is not None:
            biases = (load(bias_ref, (e, half, features.lane), features.inside) for half in (0, 1))
            halves = [
                half + bias.astype(jnp.float32)[None, :] for half, bias in zip(halves, biases, strict=True)
            ]
        hidden = activation(*halves, swish=kernel_swish).astype(hidden_ref.dtype)
        index = row[:, None], place_of(features.lane)[None, :]
        plgpu.store(hidden_ref.at[index], hidden, mask=both(Lanes(row, real), features))

    _for_each_block(call, groups_ref, rows_ref, compute)


def _output(
    stored: _Stored,
    call: _Call,
    groups_ref: Any,
    rows_ref: Any,
    hidden_ref: Any,
    bias_ref: Any,
    weights_ref: Any,
    *refs: Any,
) -> None:
    """One program: some columns of the weighted outputs of one expert's rows."""
    *down, out_ref = refs
    place, block = pl.program_id(0), call.config.block_model
    steps = stored.steps(call.config.block_depth, call.config.block_rows)
    elements = Lanes.of(place, block, stored.columns)

    def compute(e: Array, row: Array, real: Array) -> None:
        mine = Lanes(row, real)
        weights = load(weights_ref, (row,), real)
        tiles = stored.tiles(tuple(down), steps, block, place, e)
        [out] = multiply(hidden_ref, mine, [tiles], 0, steps.count, call.precision)
        if bias_ref is not None:
            out += load(bias_ref, (e, elements.lane), elements.inside).astype(jnp.float32)[None, :]
        index = row[:, None], elements.lane[None, :]
        plgpu.store(out_ref.at[index], out * weights[:, None], mask=both(mine, elements))

    _for_each_block(call, groups_ref, rows_ref, compute)


def _for_each_block(
    call: _Call, groups_ref: Any, rows_ref: Any, compute: Callable[[Array, Array, Array], None]
) -> None:
    """Calls `compute` with the expert of this program, and rows of it: their numbers, and which are real."""
    group, size = pl.program_id(1), call.config.block_rows
    if call.tokens == 1:
        e = load(groups_ref, (0, group), None)
        count = ((e >= 0) & (e < call.experts)).astype(jnp.int32)
    else:
        e, count = (load(groups_ref, (group, part), None) for part in (0, 1))

    def one_block(block: Array, _: None) -> None:
        slot = block * size + jnp.arange(size, dtype=jnp.int32)
        real = slot < count
        row = group if call.tokens == 1 else load(rows_ref, (group, slot), real)
        # Padding lies after the last row, for the interpreter writes back what a mask keeps it from writing.
        compute(e, jnp.where(real, row, call.tokens * call.top_k), real)

    jax.lax.fori_loop(0, pl.cdiv(count, size), one_block, None)


def _expert(call: _Call, experts_ref: Any) -> Array:
    """The expert of this program; -1 if it has none."""
    group = pl.program_id(0)
    if call.groups == call.experts:
        return group
    # The group of a row: the first row of an expert stands for all.
    row = jnp.arange(pl.next_power_of_2(call.groups), dtype=jnp.int32)
    all_ids = plgpu.load(experts_ref.at[row // call.top_k, row % call.top_k], mask=row < group, other=-1)
    own = plgpu.load(experts_ref.at[group // call.top_k, group % call.top_k])
    earlier = jnp.sum((all_ids == own).astype(jnp.int32))
    return jnp.where((earlier > 0) | (own < 0) | (own >= call.experts), -1, own)


def _rows_of(call: _Call, experts_ref: Any, e: Array, chunk: Array) -> tuple[Array, Array]:
    """Of each token of a chunk: 1 if it has chosen the expert, else 0; and its row then."""
    token = chunk * call.chunk + jnp.arange(call.chunk, dtype=jnp.int32)
    column = jnp.arange(pl.next_power_of_2(call.top_k), dtype=jnp.int32)
    there = (token < call.tokens)[:, None] & (column < call.top_k)[None, :]
    ids = plgpu.load(experts_ref.at[token[:, None], column[None, :]], mask=there, other=-1)
    hit = (ids == e) & (e >= 0)
    # By the maximum, not by a sum: were an expert named twice, no row of another token would be touched.
    own = jnp.max(jnp.where(hit, column[None, :], -1), axis=1)
    return (own >= 0).astype(jnp.int32), token * call.top_k + own
