"""Qwen3, dense: per-head norms of queries and keys, grouped-query attention, no biases.

The skeleton and the shared layers are Qwen3's, so this file has only the key table.
"""

from jetspec_jax.models.key_table import ENDS, LAYER_KEYS
from jetspec_jax.models.transformer import Transformer


class Qwen3(Transformer):
    """A Qwen3 target (``model_type`` "qwen3")."""

    KEYS = (
        *ENDS,
        *(key.under("model.") for key in LAYER_KEYS),
    )
