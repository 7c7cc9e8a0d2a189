"""The geometry of a decoder as frozen dataclasses, independent of any file format."""

from dataclasses import dataclass
from typing import Any

from jetspec_jax.config.quantization import Quantization
from pallas_kernels.activation import SILU, Activation
from pallas_kernels.expert_choice import RouterRule


@dataclass(frozen=True)
class Linear:
    """Rotary angles of positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True)
class Llama3:
    """Rotary scaling of Llama 3: long wavelengths are stretched.

    Attributes:
        factor: The stretch.
        low_freq_factor: Wavelengths above ``original_context / low_freq_factor`` are stretched fully.
        high_freq_factor: Wavelengths below ``original_context / high_freq_factor`` are not stretched.
        original_context: Context length before scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Yarn:
    """Rotary scaling of YaRN (Peng et al., arXiv 2309.00071): the stretch is a ramp over the pairs of a head.

    Attributes:
        factor: The stretch.
        beta_fast: Pairs with more rotations than this in the original context are not stretched.
        beta_slow: Pairs with fewer rotations than this are stretched fully.
        original_context: Context length before scaling, in tokens.
        truncate: Whether the ramp's ends are rounded to whole elements.
        attention_factor: Factor of cosines and sines.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int
    truncate: bool
    attention_factor: float


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer; `jetspec_jax.models.rotary` computes its angles.

    Attributes:
        theta: Base of the frequencies.
        size: The first ``size`` elements of a head are paired: i with i + size / 2.
        turning: The first ``turning`` pairs are rotated; None means all.
        scaling: The change of frequencies for contexts beyond the original one.
    """

    theta: float
    size: int
    turning: int | None = None
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer.

    An expert has ``size`` hidden features; ``biases`` are those of both products.
    """

    count: int
    size: int
    routing: RouterRule
    activation: Activation = SILU
    biases: bool = False


@dataclass(frozen=True)
class Recurrence:
    """A gated delta net, which keeps a recurrent state instead of keys and values.

    Attributes:
        num_key_heads: Heads of queries and keys.
        num_value_heads: Heads of values and state; a multiple of ``num_key_heads``.
        key_dim: Elements of a query or key head.
        value_dim: Elements of a value head.
        kernel: Width of the convolution in tokens, the current one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def slot_bytes(self, itemsize: int) -> int:
        """Bytes of one sequence: its state in float32, and the convolution's last ``kernel - 1`` rows."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return 4 * state + itemsize * (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class LayerConfig:
    """A decoder layer, with attention or recurrent. A recurrent layer has 0 attention heads.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Elements of a head.
        rope: The rotary embedding.
        window: Tokens that a query attends to, its own included; None means all.
        attention_scale: Factor of the products of queries and keys; None means head_dim^-0.5.
        keys_as_values: Whether the projected keys, before their norm, are also the values.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        output_bias: Whether the output projection of attention has a bias.
        mlp_size: Hidden features of the dense feed-forward block; 0 if there is none.
        mlp_bias: Whether the dense block's products have biases.
        activation: Activation of the dense block.
        experts: The routed experts; None if there are none.
        recurrence: The gated delta net of a recurrent layer; None in attention layers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    attention_scale: float | None = None
    keys_as_values: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_size: int = 0
    mlp_bias: bool = False
    activation: Activation = SILU
    experts: Experts | None = None
    recurrence: Recurrence | None = None

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    Attributes:
        model_type: The family: ``model_type`` of the Hugging Face config.
        layers: The layers, which may differ.
        embedding_scale: Factor of embeddings, rounded to their dtype first.
        logit_softcap: A value c makes the logits ``c * tanh(logits / c)``; None leaves them.
        further_layers: Extra layers for multi-token prediction that checkpoints may hold; they are not run.
        quantization: How weights are quantised; None if they are not.
        module: The class of a family that `jetspec_jax.register_family` has added; None is the package's. It
            tells programs of a class that was defined again from those of the earlier class.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    further_layers: int = 0
    quantization: Quantization | None = None
    module: Any = None

    @classmethod
    def uniform(cls, model_type: str, num_layers: int, **geometry: Any) -> "ModelConfig":
        """A decoder whose layers are all the same.

        ``geometry`` are arguments of `ModelConfig` and `LayerConfig`; embeddings are untied by default.
        """
        layer = {name: geometry.pop(name) for name in LayerConfig.__dataclass_fields__ if name in geometry}
        model = {"tie_word_embeddings": False, **geometry}
        return cls(model_type=model_type, layers=(LayerConfig(**layer),) * num_layers, **model)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def rounding(self) -> str:
        """The format that weights were rounded to after training; empty if they were not."""
        quantization = self.quantization
        return "" if quantization is None or quantization.is_mxfp4 else quantization.format

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window."""
        return tuple(layer.window for layer in self.layers)

    @property
    def layers_with_places(self) -> tuple[int, ...]:
        """Layers with one store entry per slot: a ring buffer for the window, or a recurrent state."""
        layers = enumerate(self.layers)
        return tuple(i for i, layer in layers if layer.window is not None or layer.recurrence is not None)


@dataclass(frozen=True)
class SelectorConfig:
    """A draft head's selector, which scores a candidate given its parent.

    Attributes:
        rank: Width of the codebooks.
        candidates: Number of best tokens of a draft row in the selector's training.
        tail: Whether the probability of a row's other tokens counts when scores become probabilities.
    """

    rank: int
    candidates: int
    tail: bool = False


#: The highest temperature of each band but the last, where `DraftScales` has a row for each.
SCALE_BANDS = (0.0, 0.8)
#: One scale per depth, or such a row for each band of temperatures.
DraftScales = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class DraftHeadConfig:
    """A draft head: decoder layers of the target's width, and the taps that they read.

    Attributes:
        layers: Geometry of the head's decoder layers.
        block_size: Draft slots, the anchor's included; trees are at most ``block_size - 1`` deep.
        num_target_layers: Layers of the target that the head was trained on; None if the config omits it.
        tap_layers: Target layers (0-based) whose outputs are the head's taps.
        mask_token_id: Token whose embedding fills the slots after the anchor.
        causal: Whether slot j attends only to slots up to j; otherwise to the whole block.
        scaled_embeddings: Whether the slots' embeddings are scaled like the target's inputs.
        capped_logits: Whether draft logits pass through the target's logit cap, which must exist.
        target_format: `ModelConfig.rounding` of the target that the head was trained with.
        selector: The selector; None if all nodes of a depth share a draft row.
        draft_scales: Scale of the head's errors at each depth, see `DraftScoring`; None means 1.
    """

    layers: ModelConfig
    block_size: int
    num_target_layers: int | None
    tap_layers: tuple[int, ...]
    mask_token_id: int
    causal: bool
    scaled_embeddings: bool = True
    capped_logits: bool = False
    target_format: str = ""
    selector: SelectorConfig | None = None
    draft_scales: DraftScales | None = None

    @property
    def depth(self) -> int:
        """Largest depth of a token tree of this head."""
        return self.block_size - 1

    @property
    def selected(self) -> int | None:
        """The number of candidates that the selector was trained with; None without one."""
        return None if self.selector is None else self.selector.candidates
