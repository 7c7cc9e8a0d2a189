"""Key tables: which tensor of a published checkpoint is which parameter of ours."""

import math
import re
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Key:
    """One line of a key table.

    Attributes:
        name: The tensor's published name, with ``{}`` where a layer index goes.
        path: Dotted path of the parameter, with ``{}`` where the index goes.
        inputs: How many leading axes of the parameter are the inputs of a torch ``Linear``, which stores
            ``[out, in]`` with head axes merged. 0: the file holds the parameter as it is.
    """

    name: str
    path: str
    inputs: int = 0

    def under(self, prefix: str) -> "Key":
        """The same entry for tensors whose names begin with ``prefix``."""
        return replace(self, name=prefix + self.name)

    def published_name(self, path: str) -> str | None:
        """The published name of the parameter at a dotted path; None if the entry is for others."""
        match = re.fullmatch(re.escape(self.path).replace(r"\{\}", r"(\d+)"), path)
        return match and self.name.format(*match.groups())

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in the file of a parameter of ``shape``."""
        if not self.inputs:
            return shape
        return math.prod(shape[self.inputs :]), math.prod(shape[: self.inputs])

    def from_file(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The parameter of ``shape`` that a file's tensor holds."""
        return (tensor.T if self.inputs else tensor).reshape(shape)

    def to_file(self, value: np.ndarray) -> np.ndarray:
        """The file's tensor for a parameter: the inverse of `from_file`."""
        if not self.inputs:
            return value
        return np.ascontiguousarray(value.reshape(self.file_shape(value.shape)[::-1]).T)


LAYER_KEYS = (
    *(
        Key(f"layers.{{}}.{name}.weight", f"layers.{{}}.{name}", inputs)
        for name, inputs in {
            "self_attn.q_proj": 1,
            "self_attn.k_proj": 1,
            "self_attn.v_proj": 1,
            "self_attn.o_proj": 2,
            "mlp.gate_proj": 1,
            "mlp.up_proj": 1,
            "mlp.down_proj": 1,
        }.items()
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
