"""The supported GGUF architectures: llama.cpp's tensor names and its converter's changes."""

from collections.abc import Mapping
from dataclasses import dataclass

from jetspec_jax.arguments import shown
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
# Files have one tensor for all experts of a layer.
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
    """llama.cpp's storage of a model family.

    Attributes:
        model_type: The family: ``model_type`` of its ``config.json``.
        class_name: transformers' class, for ``architectures`` of the ``config.json``.
        layer_names: The published names of a layer's tensors, by llama.cpp's names.
        paired_rows: Whether rows of queries and keys are stored for interleaved rotary embeddings, with the
            two elements of a pair side by side.
        centered_norms: Whether files have 1 + w for norms that are published as w.
        unread: Tensors that only the config is made from.
    """

    model_type: str
    class_name: str
    layer_names: Mapping[str, str]
    paired_rows: bool = False
    centered_norms: bool = False
    unread: tuple[str, ...] = ()

    def published(self, name: str) -> str | None:
        """The published name of a tensor, with ``{}`` for an expert's index; None if it is unknown."""
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            return None
        if found := _ENDS.get(stem):
            return f"{found}.{suffix}"
        block, _, rest = stem.partition(".")
        layer, _, part = rest.partition(".")
        if block != "blk" or not layer.isdecimal() or part not in self.layer_names:
            return None
        return f"model.layers.{layer}.{self.layer_names[part]}.{suffix}"


#: The factors of Llama 3's rotary scaling.
ROPE_FACTORS = "rope_freqs.weight"

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _PRE_NORM, paired_rows=True, unread=(ROPE_FACTORS,)),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _PRE_NORM),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _PRE_NORM),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", {**_PRE_NORM, **_EXPERTS}),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SANDWICH, centered_norms=True),
}


def name_of(header: Header) -> str:
    """The architecture of a file's model, one of `ARCHITECTURES`."""
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if kind == "adapter":
        raise ValueError("it is a LoRA adapter and not a model; merge it into its model first")
    if kind == "mmproj" or name == "clip":
        raise ValueError("it is the projector of a multimodal model; give the file of its text model")
    if kind != "model":
        raise ValueError(f"general.type is {shown(kind)}; only 'model' is supported")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {shown(name)} is not supported in GGUF; supported: {', '.join(ARCHITECTURES)}"
        )
    return name
