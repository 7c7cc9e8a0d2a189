"""Qwen3-MoE: Qwen3 with routed experts instead of the feed-forward block in most or all layers."""

import numpy as np

from jetspec_jax.models.key_table import ENDS, LAYER_KEYS, Key
from jetspec_jax.models.transformer import Transformer

_GATE_UP, _DOWN = "layers.{}.mlp.experts.gate_up_proj", "layers.{}.mlp.experts.down_proj"


class Qwen3MoE(Transformer):
    """A Qwen3-MoE target (``model_type`` "qwen3_moe"). Published files have one tensor per expert."""

    KEYS = (
        *ENDS,
        Key("model.layers.{}.mlp.gate.weight", "layers.{}.mlp.router"),
        *(key.under("model.") for key in LAYER_KEYS),
        *(
            Key(f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight", path, layout, part, expert=True)
            for name, path, layout, part in (
                ("gate_proj", _GATE_UP, "m i -> i m", np.s_[:, 0]),
                ("up_proj", _GATE_UP, "m i -> i m", np.s_[:, 1]),
                ("down_proj", _DOWN, "i m -> m i", ...),
            )
        ),
        Key(f"model.{_GATE_UP}", _GATE_UP, "e m two i -> e (two i) m", form="fused"),
        Key(f"model.{_DOWN}", _DOWN, "e i m -> e m i", form="fused"),
    )
