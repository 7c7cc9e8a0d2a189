"""Key tables: the mapping from a published checkpoint's tensors to parameters."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from flax import nnx

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.layout import Layout, parse_layout
from jetspec_jax.models.mxfp4 import packed_shapes, widen
from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES

#: The path of a parameter in the nested weights.
ParameterPath = tuple[str | int, ...]
#: Calls a function with each item of an iterable, possibly in parallel.
Each = Callable[[Callable[[Any], None], Iterable[Any]], None]


def one_by_one(function: Callable[[Any], None], things: Iterable[Any]) -> None:
    """Calls the function with each item in turn."""
    for thing in things:
        function(thing)


def key_path(path: ParameterPath) -> str:
    """A parameter's path as in key tables: dotted, with ``{}`` for indices."""
    return ".".join("{}" if isinstance(part, int) else part for part in path)


def parameters_of(module: nnx.Module) -> list[tuple[ParameterPath, nnx.Variable]]:
    """A module's parameters, or their shapes, by path."""
    return [(tuple(path), found) for path, found in nnx.to_flat_state(nnx.state(module, nnx.Param))]  # pyright: ignore[reportReturnType]


class ShardRows(NamedTuple):
    """A device's shard of a parameter, as indices along each axis.

    Attributes:
        rows: For each axis, the shard's rows in order; -1 is padding, which files do not have.
        sizes: For each axis, the parameter's number of rows without padding.
        repeats: For each axis, how often each row of the file is repeated in tensors with `Key.repeated`.
    """

    rows: tuple[np.ndarray, ...]
    sizes: tuple[int, ...]
    repeats: tuple[int, ...]


@dataclass(frozen=True)
class Key:
    """An entry of a key table: the tensor that holds a parameter, or a part of it.

    A layer's matrix, and the same matrix of every expert, stored one tensor per expert::

        Key("layers.{}.mlp.up_proj.weight", "layers.{}.mlp.gate_up_proj", "m i -> i m", np.s_[:, 1])
        Key("layers.{}.mlp.experts.{}.up_proj.weight", "layers.{}.mlp.experts.gate_up_proj",
            "m i -> i m", np.s_[:, 1], expert=True)

    Attributes:
        name: The tensor's published name, with ``{}`` for the layer index.
        path: Dotted path of the parameter, with ``{}`` for the layer index.
        layout: The file's layout of this part of the parameter, see `parse_layout`. Empty: the same axes.
        part: Index of the part of the parameter that the tensor holds; a fused parameter consists of several
            published tensors.
        expert: Whether each expert has a separate tensor. The name's last ``{}`` is then an index of the
            parameter's first axis, and ``layout`` and ``part`` refer to one expert.
        form: The storage form, if files store the parameter in different ways. A file has all tensors of one
            form and none of another. Checkpoints are written in the form of the table's first entry.
        repeated: Whether the tensor has KV heads, which are repeated if there are more devices than heads.
        scales: For a tensor of MXFP4 blocks, the name of its scales. ``layout`` is then that of the values.
            It has three axes or more, and the file's last axis, along which the blocks lie, is unmerged.
    """

    name: str
    path: str
    layout: str = ""
    part: Any = ...
    expert: bool = False
    form: str = ""
    scales: str = ""
    repeated: bool = False

    def __post_init__(self):
        layout = parse_layout(self.layout) if self.layout else Layout((), ())
        if self.scales and (len(layout.order) < 3 or layout.merged[-1] != 1):
            raise ValueError(
                f"{self.name}: MXFP4 blocks need a layout of three axes or more, with the last one of the "
                f"file unmerged, not {self.layout!r}"
            )
        expected = self.path.count("{}") + self.expert
        for name in self.names:
            if name.count("{}") != expected:
                raise ValueError(f"{name} has {name.count('{}')} indices, and {self.path} needs {expected}")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors: one, or blocks and scales."""
        return (self.name, self.scales) if self.scales else (self.name,)

    def picks(self, count: int) -> list[int | slice]:
        """The entry's `part` as one index or slice for each of ``count`` axes."""
        given = self.part if isinstance(self.part, tuple) else (self.part,)
        at = given.index(...) if ... in given else len(given)
        return [*given[:at], *[slice(None)] * (count - len(given) + (... in given)), *given[at + 1 :]]

    def under(self, prefix: str, instead_of: str = "") -> "Key":
        """The entry with its name's prefix ``instead_of`` replaced; without that prefix it is unchanged."""
        if not self.name.startswith(instead_of):
            return self
        name, *scales = (prefix + name.removeprefix(instead_of) for name in self.names)
        return replace(self, name=name, scales="".join(scales))

    def of(self, indices: Sequence[int], shape: tuple[int, ...]) -> list["Key"]:
        """The entries of one parameter: one, or with `expert` one per expert.

        ``indices`` are the values of the path's ``{}``.
        """
        places = [(*indices, i) for i in range(shape[0])] if self.expert else [tuple(indices)]
        inner = self.part if isinstance(self.part, tuple) else (self.part,)
        return [
            replace(
                self,
                name=self.name.format(*place),
                path=self.path.format(*indices),
                part=(place[-1], *inner) if self.expert else self.part,
                expert=False,
                scales=self.scales.format(*place),
            )
            for place in places
        ]

    def file_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes of the file's tensors, in the order of `names`, for a parameter of ``shape``.

        Raises:
            ValueError: The layout has another number of axes than the part, or the rows do not consist of
                whole MXFP4 blocks.
        """
        view = self._view(np.broadcast_to(0, shape))
        shape = parse_layout(self.layout).shape(view) if self.layout else view.shape
        return packed_shapes(shape) if self.scales else (shape,)

    def of_part(self, shard: ShardRows) -> tuple["Key", list[list[np.ndarray]]] | None:
        """The entry of a device's shard of a parameter, and the rows that it needs of the file.

        Returns:
            The entry, and for each of `names` the rows along each axis. None if the shard has nothing of this
            tensor, which belongs to another device's expert.

        Raises:
            ValueError: The shard begins or ends inside an MXFP4 block.
        """
        index = self.picks(len(shard.rows))
        rows, sizes, local = [], [], list(index)
        for axis, pick in enumerate(index):
            row, size = shard.rows[axis], shard.sizes[axis]
            if self.repeated:
                row, size = row // shard.repeats[axis], size // shard.repeats[axis]
            if isinstance(pick, int):
                [place] = np.flatnonzero(row == pick % size) if pick % size in row else [None]
                if place is None:
                    return None
                local[axis] = int(place)
            elif pick == slice(None):
                rows.append(row)
                sizes.append(size)
            else:
                assert len(row) == size, f"{self.name}: a part of an axis that devices split"
                sizes.append(len(range(size)[pick]))
                rows.append(np.arange(sizes[-1]))
        layout = parse_layout(self.layout) if self.layout else None
        order = range(len(rows)) if layout is None else layout.order
        axes = iter([(rows[axis], sizes[axis]) for axis in order])
        in_file = []
        for merged in [1] * len(rows) if layout is None else layout.merged:
            flat = np.zeros(1, np.int64)
            for row, size in (next(axes) for _ in range(merged)):
                flat = np.where(row < 0, -1, flat[:, None] * size + row).reshape(-1)
            in_file.append(flat)
        entry = replace(self, part=tuple(local))
        if not self.scales:
            return entry, [in_file]
        *others, values = in_file
        starts = values[::BLOCK]
        blocks = (starts[:, None] + np.arange(BLOCK)).reshape(-1)
        if not np.array_equal(values, blocks) or (starts % BLOCK).any():
            raise ValueError(f"parts of {len(values)} values cut MXFP4 blocks of {BLOCK}")
        numbers = starts // BLOCK
        return entry, [[*others, numbers, np.arange(BLOCK_BYTES)], [*others, numbers]]

    def from_file(self, parameter: np.ndarray, *tensors: np.ndarray, each: Each = one_by_one) -> None:
        """Fills the entry's part of a parameter from the file's tensors, in the order of `names`.

        ``each`` runs the copy of each tile; tiles are disjoint.

        Raises:
            ValueError: An MXFP4 scale is not a number. It is raised inside ``each``.
        """
        view = self._view(parameter)
        tiles = parse_layout(self.layout).tiles(view) if self.layout and view.ndim > 1 else [...]
        if self.scales:
            blocks = tensors[0].reshape(*view.shape[:-1], -1, BLOCK_BYTES)
            scales = tensors[1].reshape(*view.shape[:-1], -1)

            def copy(tile: Any) -> None:
                view[tile] = widen(blocks[tile], scales[tile], view.dtype)
        else:
            tensor = tensors[0].reshape(view.shape)

            def copy(tile: Any) -> None:
                view[tile] = tensor[tile]

        each(copy, tiles)

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """The file's tensor for a parameter: the inverse of `from_file`. MXFP4 cannot be written."""
        assert not self.scales, f"{self.name}: MXFP4 is read only"
        return np.asarray(self._view(parameter).reshape(self.file_shapes(parameter.shape)[0]), order="C")

    def _view(self, parameter: np.ndarray) -> np.ndarray:
        part = parameter[self.part]
        if not self.layout:
            return part
        layout = parse_layout(self.layout)
        if part.ndim != len(layout.order):
            raise ValueError(
                f"{self.name}: layout {self.layout!r} has {len(layout.order)} axes, and its part of "
                f"{self.path} {list(parameter.shape)} has {part.ndim}"
            )
        return part.transpose(layout.order)  # the axes in the order of the file, unmerged


@dataclass(frozen=True)
class Skip:
    r"""Tensors of a checkpoint that are not loaded: other modalities, other heads.

    Attributes:
        pattern: Regular expression of the whole name, such as ``r"model\.visual\..*"``.
        reason: A description for display: "vision tower".
        further_layers: Whether only `ModelConfig.further_layers` are skipped. The pattern's first group must
            then be the layer's index: ``r"model\.layers\.(\d+)\..*"``.
    """

    pattern: str
    reason: str
    further_layers: bool = False

    def __post_init__(self):
        if self.further_layers and not re.compile(self.pattern).groups:
            raise ValueError(f"{self.pattern!r} has no group for the layer's index")

    def matches(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor of this name is skipped in a model of this config."""
        match = re.fullmatch(self.pattern, name)
        if not match or not self.further_layers:
            return bool(match)
        return 0 <= int(match[1]) - config.num_layers < config.further_layers


#: The parameters before and after the layers.
ENDS = (
    Key("model.embed_tokens.weight", "embed_tokens"),
    Key("model.norm.weight", "norm.weight"),
    Key("lm_head.weight", "lm_head"),
)

#: The output head of a multimodal model's text model, in files that store it under the text model's prefix.
NESTED_HEAD = Key("language_model.lm_head.weight", "lm_head", form="nested")

_KV = "m g e -> (g e) m"

LAYER_KEYS = (
    *(
        Key(f"layers.{{}}.{name}.weight", f"layers.{{}}.{path}", layout, part, repeated=layout == _KV)
        for name, path, layout, part in (
            ("self_attn.q_proj", "self_attn.qkv_proj", "m g r e -> (g r e) m", np.s_[:, :, :-2]),
            ("self_attn.k_proj", "self_attn.qkv_proj", _KV, np.s_[:, :, -2]),
            ("self_attn.v_proj", "self_attn.qkv_proj", _KV, np.s_[:, :, -1]),
            ("self_attn.o_proj", "self_attn.o_proj", "h e m -> m (h e)", ...),
            ("mlp.gate_proj", "mlp.gate_up_proj", "m i -> i m", np.s_[:, 0]),
            ("mlp.up_proj", "mlp.gate_up_proj", "m i -> i m", np.s_[:, 1]),
            ("mlp.down_proj", "mlp.down_proj", "i m -> m i", ...),
        )
    ),
    *(
        Key(f"layers.{{}}.{norm}.weight", f"layers.{{}}.{norm}.weight")
        for norm in (
            "self_attn.q_norm",
            "self_attn.k_norm",
            "input_layernorm",
            "post_attention_layernorm",
        )
    ),
)

_EXPERTS = "layers.{}.mlp.experts."
#: The router and the experts of Qwen's families: one tensor per expert, or fused ones.
EXPERT_KEYS = (
    Key("layers.{}.mlp.gate.weight", "layers.{}.mlp.router"),
    *(
        Key(f"{_EXPERTS}{{}}.{name}.weight", f"{_EXPERTS}{path}", layout, part, expert=True)
        for name, path, layout, part in (
            ("gate_proj", "gate_up_proj", "m i -> i m", np.s_[:, 0]),
            ("up_proj", "gate_up_proj", "m i -> i m", np.s_[:, 1]),
            ("down_proj", "down_proj", "i m -> m i", ...),
        )
    ),
    Key(f"{_EXPERTS}gate_up_proj", f"{_EXPERTS}gate_up_proj", "e m two i -> e (two i) m", form="fused"),
    Key(f"{_EXPERTS}down_proj", f"{_EXPERTS}down_proj", "e i m -> e m i", form="fused"),
)

#: The additional norms of a `SandwichLayer`.
SANDWICH_KEYS = tuple(
    Key(f"layers.{{}}.{norm}.weight", f"layers.{{}}.{norm}.weight")
    for norm in ("pre_feedforward_layernorm", "post_feedforward_layernorm")
)

#: The biases of attention's projections, if the config has them.
ATTENTION_BIAS_KEYS = tuple(
    Key(
        f"layers.{{}}.self_attn.{name}.bias", f"layers.{{}}.self_attn.{path}", layout, part, repeated=repeated
    )
    for name, path, layout, part, repeated in (
        ("q_proj", "qkv_bias", "g r e -> (g r e)", np.s_[:, :-2], False),
        ("k_proj", "qkv_bias", "g e -> (g e)", np.s_[:, -2], True),
        ("v_proj", "qkv_bias", "g e -> (g e)", np.s_[:, -1], True),
        ("o_proj", "o_bias", "", ..., False),
    )
)

#: The biases of the dense feed-forward block, if the config has them.
MLP_BIAS_KEYS = tuple(
    Key(f"layers.{{}}.mlp.{name}.bias", f"layers.{{}}.mlp.{path}", "", part)
    for name, path, part in (
        ("gate_proj", "gate_up_bias", 0),
        ("up_proj", "gate_up_bias", 1),
        ("down_proj", "down_bias", ...),
    )
)
