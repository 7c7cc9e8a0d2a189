"""The config of Qwen3-Next (``model_type`` "qwen3_next"): the same layers as Qwen3.5 with experts."""

from jetspec_jax.config.fields import Fields
from jetspec_jax.config.geometry import ModelConfig
from jetspec_jax.config.qwen3_5 import read_blocks, read_hybrid


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen3-Next config."""
    fields.only("use_sliding_window", False, default=False)
    fields.inert("sliding_window", "max_window_layers")
    renormalise = fields.flag("norm_topk_prob", default=True)
    return read_hybrid(fields, "qwen3_next", read_blocks(fields, renormalise=renormalise))
