"""Key tables: which tensor of a published checkpoint is which parameter of ours."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Key:
    """One line of a key table.

    Attributes:
        name: The tensor's published name, with ``{}`` where a layer index goes.
        path: Dotted path of the parameter, with ``{}`` where the index goes.
        inputs: How many leading axes of the parameter are the inputs of a torch ``Linear``, which stores
            ``[out, in]`` with head axes merged. 0: the file holds the parameter as it is.
        part: Which part of the parameter the tensor is, as an index; several published tensors may make up
            one fused parameter.
    """

    name: str
    path: str
    inputs: int = 0
    part: Any = ...

    def under(self, prefix: str) -> "Key":
        """The same entry for tensors whose names begin with ``prefix``."""
        return replace(self, name=prefix + self.name)

    def published_name(self, path: str) -> str | None:
        """The published name of the parameter at a dotted path; None if the entry is for others."""
        match = re.fullmatch(re.escape(self.path).replace(r"\{\}", r"(\d+)"), path)
        return match and self.name.format(*match.groups())

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the file of (this part of) a parameter of ``shape``."""
        shape = np.broadcast_to(0, shape)[self.part].shape
        if not self.inputs:
            return shape
        return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])

    def from_file(self, tensor: np.ndarray, parameter: np.ndarray) -> None:
        """Fills (this part of) a parameter from a file's tensor."""
        part = parameter[self.part]
        part[...] = (tensor.T if self.inputs else tensor).reshape(part.shape)

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """The file's tensor for a parameter: the inverse of `from_file`."""
        part = parameter[self.part]
        if self.inputs:
            part = part.reshape(self.file_shape(parameter.shape)[::-1]).T
        return np.ascontiguousarray(part)


LAYER_KEYS = (
    *(
        Key(f"layers.{{}}.{name}.weight", f"layers.{{}}.{path}", inputs, part)
        for name, path, inputs, part in (
            ("self_attn.q_proj", "self_attn.qkv_proj", 1, np.s_[:, :, :-2]),
            ("self_attn.k_proj", "self_attn.qkv_proj", 1, np.s_[:, :, -2]),
            ("self_attn.v_proj", "self_attn.qkv_proj", 1, np.s_[:, :, -1]),
            ("self_attn.o_proj", "self_attn.o_proj", 2, ...),
            ("mlp.gate_proj", "mlp.gate_up_proj", 1, np.s_[:, 0]),
            ("mlp.up_proj", "mlp.gate_up_proj", 1, np.s_[:, 1]),
            ("mlp.down_proj", "mlp.down_proj", 1, ...),
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
