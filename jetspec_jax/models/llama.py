"""Llama, Mistral and Qwen2: no norms of queries and keys, and optional biases."""

from jetspec_jax.models.attention import PlainAttention
from jetspec_jax.models.decoder_layer import DecoderLayer
from jetspec_jax.models.key_table import ATTENTION_BIAS_KEYS, ENDS, LAYER_KEYS, MLP_BIAS_KEYS
from jetspec_jax.models.transformer import Transformer


class LlamaLayer(DecoderLayer):
    """A pre-norm layer whose attention has no norms."""

    ATTENTION = PlainAttention


class Llama(Transformer):
    """A Llama, Mistral or Qwen2 target (``model_type`` "llama", "mistral", "qwen2")."""

    LAYER = LlamaLayer
    KEYS = (
        *ENDS,
        *(key.under("model.") for key in (*LAYER_KEYS, *ATTENTION_BIAS_KEYS, *MLP_BIAS_KEYS)),
    )
