"""The config of GPT-OSS (``model_type`` "gpt_oss"): all layers have experts, every other layer slides."""

from jetspec_jax.config.fields import MAX_EXPERTS, Fields
from jetspec_jax.config.geometry import Experts, LayerConfig, ModelConfig, Rope
from jetspec_jax.config.layers import (
    check_top_k,
    read_decoder,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
)
from jetspec_jax.config.rope import FULL, SLIDING, read_rope
from pallas_kernels.activation import Activation
from pallas_kernels.expert_choice import RouterRule

# The defaults of transformers 5 for a file without rotary settings.
USUAL_THETA = 150000.0
USUAL_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a GPT-OSS config."""
    fields.only("hidden_act", "silu", default="silu")
    fields.only("attention_bias", True, default=True)
    # `initial_context_length` repeats a setting of YaRN.
    fields.inert("router_aux_loss_coef", "output_router_logits", "initial_context_length")
    _check_quantization(fields)
    decoder, heads = read_decoder(fields), read_heads(fields)
    # Published files omit alpha, and files of transformers 4 both: all readers use these defaults.
    fields.assume(swiglu_limit=7.0, swiglu_alpha=1.702)
    top_k = "num_experts_per_tok", "experts_per_token"
    experts = Experts(
        count=fields.integer("num_local_experts", "num_experts", most=MAX_EXPERTS),
        size=fields.integer("intermediate_size"),
        # The softmax over the chosen logits equals the renormalised softmax over all.
        routing=RouterRule(fields.integer(*top_k, most=MAX_EXPERTS)),
        activation=Activation.gpt_oss(fields.positive("swiglu_limit"), fields.positive("swiglu_alpha")),
        biases=True,
    )
    check_top_k(fields, experts, *top_k)
    shared = {
        **heads,
        "qkv_bias": True,
        "output_bias": True,
        "rope": _rope(fields, heads["head_dim"]),
        "experts": experts,
    }
    num_layers = read_num_layers(fields)
    kinds = read_layer_types(fields, num_layers) or [(SLIDING, FULL)[i % 2] for i in range(num_layers)]
    window = read_window(fields, SLIDING in kinds)
    return ModelConfig(
        model_type="gpt_oss",
        **decoder,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(LayerConfig(**shared, window=window if kind == SLIDING else None) for kind in kinds),
    )


def _rope(fields: Fields, head_dim: int) -> Rope:
    """The rotary embedding: YaRN, unless the file says otherwise."""
    if "rope_parameters" not in fields and fields.get("rope_scaling") in (None, {}):
        fields.raw = {**fields.raw, "rope_scaling": USUAL_SCALING}
    return read_rope(fields, head_dim, ("default", "yarn"), theta=USUAL_THETA)


def _check_quantization(fields: Fields) -> None:
    """Checks that the quantisation is MXFP4; the loader recognises it by the tensors' names."""
    quantization = fields.object("quantization_config")
    if quantization is None:
        return
    if (method := quantization.get("quant_method")) != "mxfp4":
        raise ValueError(
            f"{fields.where}: quantization_config of quant_method {method!r} is not supported; "
            "supported for GPT-OSS: mxfp4"
        )
    quantization.inert("modules_to_not_convert", "dequantize")
    quantization.done()
