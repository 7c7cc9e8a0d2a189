"""What the forward pass of a decoder needs to know, as frozen records: nothing here is read from a file."""

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
    """Rotary angles of Llama 3: wavelengths beyond a part of the original context are stretched.

    Attributes:
        factor: By how much.
        low_freq_factor: Wavelengths beyond the context divided by this are stretched whole.
        high_freq_factor: Wavelengths below the context divided by this are not.
        original_context: Tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Yarn:
    """Rotary angles of YaRN (Peng et al., arXiv 2309.00071): a ramp between stretched and not, by rotations.

    Attributes:
        factor: By how much.
        beta_fast: Elements that turn more often than this in the original context keep their frequency.
        beta_slow: Elements that turn less often are stretched whole.
        original_context: Tokens.
        truncate: Whether the ramp's ends are rounded to whole elements.
        attention_factor: What cosines and sines are multiplied with.
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
    """The rotary embedding of a layer; `jetspec_jax.models.rotary` makes angles of it.

    Attributes:
        theta: Base of the frequencies.
        size: Elements of a head that it pairs, the first ones: i with i + size / 2.
        turning: How many of the pairs turn, the first ones; None is all of them.
        scaling: What is done for contexts beyond the original one.
    """

    theta: float
    size: int
    turning: int | None = None
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Experts:
    """The routed experts of a layer.

    Attributes:
        count: How many there are.
        size: Features of each.
        routing: How a token's are chosen and weighted.
        activation: Between their two products.
        biases: Whether both products have one.
    """

    count: int
    size: int
    routing: RouterRule
    activation: Activation = SILU
    biases: bool = False


@dataclass(frozen=True)
class Recurrence:
    """A gated delta net: what a layer has that keeps a state in place of keys and values.

    Attributes:
        num_key_heads: Heads of its queries and keys.
        num_value_heads: Heads of its values and of its state; a multiple of those, which they share evenly.
        key_dim: Elements of a head's query, and of its key.
        value_dim: Elements of a head's value.
        kernel: Tokens that its convolution sees, the own one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Elements of a row that the convolution passes over: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state_size(self) -> int:
        """Elements of a sequence's state."""
        return self.num_value_heads * self.key_dim * self.value_dim

    def slot_bytes(self, itemsize: int) -> int:
        """Bytes that a sequence keeps: its state in float32, and the rows that the convolution still sees.

        Args:
            itemsize: Bytes of an element of those rows.
        """
        return 4 * self.state_size + itemsize * (self.kernel - 1) * self.channels


@dataclass(frozen=True)
class LayerConfig:
    """A decoder layer: of attention, or a recurrent one, which has no heads of attention.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Elements of a head.
        rope: The rotary embedding.
        window: Tokens that a query sees, its own included; None is all.
        attention_scale: What products of queries and keys are multiplied with; None is head_dim^-0.5.
        keys_as_values: Whether the projected keys are also the values, before both are normed.
        qkv_bias: Whether the projections of queries, keys and values have biases.
        output_bias: Whether the output projection of attention has a bias.
        mlp_size: Features of the dense feed-forward block; 0 where there is none.
        mlp_bias: Whether that block's products have biases.
        activation: Between that block's two products.
        experts: The routed experts, if there are any.
        recurrence: What a recurrent layer has in place of attention; None is attention.
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
        """Elements of a token's keys and values."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class ModelConfig:
    """A decoder.

    Attributes:
        model_type: The family, as Hugging Face names it.
        layers: Its layers; they may differ.
        embedding_scale: What embeddings are multiplied with, once it is rounded to their dtype.
        logit_softcap: c makes logits ``c * tanh(logits / c)``; None leaves them.
        further_layers: Layers after these that files may hold, for predicting further tokens. None is run.
        quantization: How weights are quantised, if they are.
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

    @classmethod
    def uniform(cls, model_type: str, num_layers: int, **geometry: Any) -> "ModelConfig":
        """A decoder whose layers are all the same.

        Args:
            model_type: The family.
            num_layers: How many layers it has.
            **geometry: The other arguments of `ModelConfig` and those of `LayerConfig`; unless they say so,
                embeddings are not tied.
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
        """The format that the weights were rounded to after training; empty if they were not."""
        own = self.quantization
        return "" if own is None or own.is_mxfp4 else own.format

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window."""
        return tuple(layer.window for layer in self.layers)

    @property
    def layers_with_places(self) -> tuple[int, ...]:
        """The layers whose stores have a place for each slot: a ring of the window, or a recurrent state."""
        layers = enumerate(self.layers)
        return tuple(i for i, layer in layers if layer.window is not None or layer.recurrence is not None)


@dataclass(frozen=True)
class SelectorConfig:
    """A draft head's selector, which scores a candidate knowing its parent.

    Attributes:
        rank: Width of its codebooks.
        candidates: The best tokens of a draft row that it chooses among.
        tail: Whether the probability of a row's other tokens counts when scores become probabilities.
    """

    rank: int
    candidates: int
    tail: bool = False


@dataclass(frozen=True)
class DraftHeadConfig:
    """A draft head: decoder layers of the target's width plus what it reads of the target.

    Attributes:
        layers: Geometry of the head's own decoder layers.
        block_size: Draft slots, the anchor's included; the head drafts ``block_size - 1`` tokens deep.
        num_target_layers: Depth of the target that the head was trained on; None where its config does not
            say.
        tap_layers: Target layers (0-based) whose outputs are the head's taps.
        mask_token_id: Token whose embedding fills the slots after the anchor.
        causal: Whether slot j sees the slots up to j only; otherwise it sees the whole block.
        scaled_embeddings: Whether the slots' embeddings are scaled as the target's own inputs are.
        capped_logits: Whether draft logits pass through the target's cap, which it must have then.
        target_format: How the target was quantised that the head was trained with, as `ModelConfig.rounding`
            says it; empty for one that was not.
        selector: Its selector; None where all nodes of a depth share a draft row.
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

    @property
    def depth(self) -> int:
        """Largest depth of a token tree drafted by this head."""
        return self.block_size - 1

    @property
    def selected(self) -> int | None:
        """Among how many candidates of a draft row the selector chooses; None without one."""
        return None if self.selector is None else self.selector.candidates
