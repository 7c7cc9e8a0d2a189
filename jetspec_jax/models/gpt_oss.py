"""GPT-OSS: attention sinks, biases, and experts in every layer, stored in MXFP4 in published files.

Shapes: T tokens of all sequences, M model, H query heads, E experts.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.attention import PlainAttention
from jetspec_jax.models.decoder_layer import DecoderLayer
from jetspec_jax.models.feed_forward import ExpertMLP
from jetspec_jax.models.key_table import ATTENTION_BIAS_KEYS, ENDS, LAYER_KEYS, Key
from jetspec_jax.models.layers import WideRMSNorm, param
from jetspec_jax.models.quantized import SCALES, VALUES
from jetspec_jax.models.transformer import Transformer

_ATTENTION, _MLP = "layers.{}.self_attn.", "layers.{}.mlp."
_GATE_UP, _DOWN = f"{_MLP}experts.gate_up_proj", f"{_MLP}experts.down_proj"


class GptOssAttention(PlainAttention):
    """Attention with sinks."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        self.sinks = param(rngs, (config.layers[layer].num_heads,), ("heads",), dtype)

    def sink_logits(self) -> Float32[Array, "H"]:
        """A learned logit for each head."""
        return self.sinks[...].astype(jnp.float32)


class GptOssExperts(ExpertMLP):
    """Experts whose router has a bias."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        self.router_bias = param(rngs, (self.experts.config.count,), ("router",), dtype)

    def logits(self, rows: Float[Array, "T M"]) -> Float32[Array, "T E"]:
        """The router's logits, in float32."""
        return super().logits(rows) + self.router_bias[...].astype(jnp.float32)[None]


class GptOssLayer(DecoderLayer):
    """A pre-norm layer with sinks and biased routers."""

    NORM = WideRMSNorm
    ATTENTION = GptOssAttention
    EXPERTS = GptOssExperts


class GptOss(Transformer):
    """A GPT-OSS target (``model_type`` "gpt_oss").

    transformers writes experts with the input axis first; published files have MXFP4 with the output axis
    first. Gate and up rows are interleaved in both, and in their biases.
    """

    LAYER = GptOssLayer
    KEYS = (
        *ENDS,
        *(key.under("model.") for key in (*LAYER_KEYS, *ATTENTION_BIAS_KEYS)),
        Key(f"model.{_ATTENTION}sinks", f"{_ATTENTION}sinks"),
        Key(f"model.{_MLP}router.weight", f"{_MLP}router"),
        Key(f"model.{_MLP}router.bias", f"{_MLP}router_bias"),
        Key(f"model.{_GATE_UP}_bias", f"{_MLP}experts.gate_up_bias", "e two i -> e (i two)"),
        Key(f"model.{_DOWN}_bias", f"{_MLP}experts.down_bias"),
        Key(f"model.{_GATE_UP}", _GATE_UP, "e m two i -> e m (i two)"),
        Key(f"model.{_DOWN}", _DOWN),
        *(
            Key(f"model.{path}_blocks", path, layout, form="mxfp4", scales=f"model.{path}_scales")
            for path, layout in ((_GATE_UP, "e m two i -> e (i two) m"), (_DOWN, "e i m -> e m i"))
        ),
        # The same tensors, kept packed in memory.
        Key(f"model.{_GATE_UP}_blocks", f"{_GATE_UP}.{VALUES}", "e two i g byte -> e (i two) g byte"),
        Key(f"model.{_GATE_UP}_scales", f"{_GATE_UP}.{SCALES}", "e two i g -> e (i two) g"),
        Key(f"model.{_DOWN}_blocks", f"{_DOWN}.{VALUES}"),
        Key(f"model.{_DOWN}_scales", f"{_DOWN}.{SCALES}"),
    )
