"""The architectures that are read from GGUF: llama.cpp's names of tensors, and what its converter changes."""

from collections.abc import Mapping
from dataclasses import dataclass

from jetspec_jax.checkpoint.gguf.header import Header

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORM = {**_ATTENTION, **_MLP, "ffn_norm": "post_attention_layernorm"}
# Files hold all experts of a layer in one tensor.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SANDWICH = {
    **_ATTENTION,
    **_MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores the models of a family.

    Attributes:
        model_type: The family, as its ``config.json`` names it.
        class_name: transformers' class of such models, for the ``architectures`` of a ``config.json``.
        layer_names: The published name of each tensor of a layer, by llama.cpp's.
        paired_rows: Whether rows of queries and keys are stored in the order of interleaved rotary
            embeddings: the two elements that turn together side by side.
        centered_norms: Whether norms, which are published less one, are stored with it.
        unread: Tensors that no parameter is made of, which the config has been made of.
    """

    model_type: str
    class_name: str
    layer_names: Mapping[str, str]
    paired_rows: bool = False
    centered_norms: bool = False
    unread: tuple[str, ...] = ()

    def published(self, name: str) -> str | None:
        """The published name of a tensor, with ``{}`` for an expert's number; None: it is not known."""
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            return None
        if found := _ENDS.get(stem):
            return f"{found}.{suffix}"
        block, _, rest = stem.partition(".")
        layer, _, own = rest.partition(".")
        if block != "blk" or not layer.isdecimal() or own not in self.layer_names:
            return None
        return f"model.layers.{layer}.{self.layer_names[own]}.{suffix}"


#: The factors that stretch Llama 3's rotary embedding.
ROPE_FACTORS = "rope_freqs.weight"

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _PRE_NORM, paired_rows=True, unread=(ROPE_FACTORS,)),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _PRE_NORM),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _PRE_NORM),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {**_PRE_NORM, **_EXPERTS}),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SANDWICH, centered_norms=True),
}


def name_of(header: Header) -> str:
    """The architecture of a file's model, which is one of `ARCHITECTURES`.

    Raises:
        ValueError: The file holds no whole model, or one of another architecture.
    """
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if kind == "adapter":
        raise ValueError("it is a LoRA adapter and no model; merge it into its model first")
    if kind == "mmproj" or name == "clip":
        raise ValueError(
            "it is the projector of a model of several modalities; give the file of its text model"
        )
    if kind != "model":
        raise ValueError(f"general.type is {kind!r}; only 'model' is supported")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {name!r} is not supported in GGUF; supported: {', '.join(ARCHITECTURES)}"
        )
    return name
