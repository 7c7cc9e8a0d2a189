"""Gemma 3: norms before and after every block, a gated GELU, and a rotary base for each layer type."""

from jetspec_jax.models.attention import Attention
from jetspec_jax.models.decoder_layer import SandwichLayer
from jetspec_jax.models.key_table import ENDS, LAYER_KEYS, NESTED_HEAD, SANDWICH_KEYS, Skip
from jetspec_jax.models.layers import CenteredRMSNorm
from jetspec_jax.models.transformer import Transformer


class Gemma3Attention(Attention):
    """Attention whose norms of heads are stored minus one."""

    NORM = CenteredRMSNorm


class Gemma3Layer(SandwichLayer):
    """A layer whose norms are stored minus one."""

    NORM = CenteredRMSNorm
    ATTENTION = Gemma3Attention


class Gemma3(Transformer):
    """A Gemma 3 target (``model_type`` "gemma3_text"), alone or inside the multimodal "gemma3"."""

    LAYER = Gemma3Layer
    KEYS = (*ENDS, NESTED_HEAD, *(key.under("model.") for key in (*LAYER_KEYS, *SANDWICH_KEYS)))
    PREFIXES = ("model.", "model.language_model.", "language_model.model.")
    SKIPPED = (
        Skip(r"(model\.)?vision_tower\..*", "vision tower"),
        Skip(r"(model\.)?multi_modal_projector\..*", "projector of images"),
    )
