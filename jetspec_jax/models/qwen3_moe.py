"""Qwen3-MoE: Qwen3 with routed experts instead of the feed-forward block in most or all layers."""

from jetspec_jax.models.key_table import ENDS, EXPERT_KEYS, LAYER_KEYS
from jetspec_jax.models.transformer import Transformer


class Qwen3MoE(Transformer):
    """A Qwen3-MoE target (``model_type`` "qwen3_moe"). Published files have one tensor per expert."""

    KEYS = (*ENDS, *(key.under("model.") for key in (*LAYER_KEYS, *EXPERT_KEYS)))
