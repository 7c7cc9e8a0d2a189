"""Tiny models of transformers, one for each family, with every parameter and buffer random.

Heads are no hidden / heads wide, contexts are longer than windows, several experts serve a token. Values are
rounded to bfloat16, so that a file of half the size holds them exactly.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers

VOCAB = 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@dataclass(frozen=True)
class Family:
    """A tiny model of transformers."""

    config: Callable[[], transformers.PretrainedConfig]
    model: Callable[..., torch.nn.Module]
    louder: dict[str, float] = field(default_factory=dict)
    centered: bool = False
    golden: bool = True

    @property
    def is_recurrent(self) -> bool:
        return "linear_attention" in (getattr(self.config(), "layer_types", None) or ())

    def build(self) -> torch.nn.Module:
        """The model, in float32, ready to be asked."""
        model = self.model._from_config(
            self.config(), attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if "inv_freq" not in name and "embed_scale" not in name:
                    tensor.copy_(self._values(name, tensor))
        return model

    def _values(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Random values that follow from the tensor's name: norms and scales about 1, all else about 0."""
        if name.endswith("A_log"):  # as transformers makes it: a spread of rates, which noise would not have
            rates = torch.linspace(0.05, 8.0, like.numel())
            return rates[torch.randperm(like.numel(), generator=_generator(name))].log()
        generator = _generator(name)
        noise = 0.2 * torch.randn(like.shape, generator=generator)
        plain = not self.centered or "linear_attn" in name
        near_one = ("norm" in name and plain) or name.endswith(("scale", "layer_scalar", "dt_bias"))
        factor = next((own for part, own in self.louder.items() if part in name), 1.0)
        return (factor * (1 + noise if near_one else noise)).bfloat16().float()


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


GEMMA3 = {
    **COMMON,
    "num_hidden_layers": 6,
    "intermediate_size": 48,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
}
GEMMA4 = {
    **COMMON,
    "num_hidden_layers": 6,
    "intermediate_size": 48,
    "sliding_window": 8,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
GEMMA4_EXPERTS = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
# Value heads: three for a key head, or two.
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
QWEN3_5 = {
    **COMMON,
    **RECURRENT,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
SHARED_EXPERT = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
# Queries and keys are normalised, and those of a tiny model are so short that this is mostly noise.
LONGER = {"conv1d": 5.0, "in_proj_qkv": 2.0}


def llama(*, golden=False, **changes):
    """A Llama. The rope types stretch an original context that the sequences of the tests are longer than."""
    settings = {**COMMON, "intermediate_size": 48, **changes}
    return Family(lambda: transformers.LlamaConfig(**settings), transformers.LlamaForCausalLM, golden=golden)


def mistral(**changes):
    settings = {**COMMON, "intermediate_size": 48, **changes}
    return Family(
        lambda: transformers.MistralConfig(**settings), transformers.MistralForCausalLM, golden=False
    )


def stretched(kind, **settings):
    return {"rope_type": kind, "rope_theta": 5e5, "factor": 4.0, **settings}


FAMILIES = {
    "llama": llama(
        golden=True,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=stretched(
            "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=24
        ),
    ),
    # The size of a head follows from the hidden size.
    "llama_tied": llama(head_dim=None, num_key_value_heads=None, tie_word_embeddings=True),
    "llama_linear": llama(rope_parameters=stretched("linear")),
    "llama_yarn": llama(rope_parameters=stretched("yarn", original_max_position_embeddings=24)),
    "mistral": mistral(sliding_window=8, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "mistral_full": mistral(sliding_window=None),
    "qwen2": Family(
        lambda: transformers.Qwen2Config(
            **{key: value for key, value in COMMON.items() if key != "head_dim"},
            intermediate_size=48,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        transformers.Qwen2ForCausalLM,
        golden=False,
    ),
    # The sequences of the tests are longer than the original context, and the prefixes of their trees not.
    "qwen3_yarn": Family(
        lambda: transformers.Qwen3Config(
            **{**COMMON, "max_position_embeddings": 96},
            intermediate_size=48,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 4.0,
                "original_max_position_embeddings": 24,
            },
        ),
        transformers.Qwen3ForCausalLM,
        golden=False,
    ),
    "qwen3_moe": Family(
        lambda: transformers.Qwen3MoeConfig(
            **COMMON,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        ),
        transformers.Qwen3MoeForCausalLM,
    ),
    "qwen3_moe_sliding": Family(
        lambda: transformers.Qwen3MoeConfig(
            **COMMON,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            use_sliding_window=True,
            sliding_window=8,
            rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        ),
        transformers.Qwen3MoeForCausalLM,
    ),
    "gemma3": Family(
        lambda: transformers.Gemma3TextConfig(**GEMMA3, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        transformers.Gemma3ForCausalLM,
        centered=True,
    ),
    "gemma3_unscaled": Family(
        lambda: transformers.Gemma3TextConfig(
            **GEMMA3, layer_types=["full_attention", "sliding_attention"] * 3, final_logit_softcapping=30.0
        ),
        transformers.Gemma3ForCausalLM,
        centered=True,
        golden=False,
    ),
    "gemma4": Family(
        lambda: transformers.Gemma4TextConfig(
            **{**GEMMA4, **GEMMA4_EXPERTS, "num_hidden_layers": 4},
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        transformers.Gemma4ForCausalLM,
    ),
    "gemma4_dense": Family(
        lambda: transformers.Gemma4TextConfig(**GEMMA4), transformers.Gemma4ForCausalLM, golden=False
    ),
    "gpt_oss": Family(
        lambda: transformers.GptOssConfig(
            **COMMON,
            intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 15e4,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        ),
        transformers.GptOssForCausalLM,
        louder={"gate_up_proj": 4.0},  # the clamp is at 7
    ),
    "step3p7": Family(
        lambda: transformers.Step3p7Config(
            text_config={
                **COMMON,
                "intermediate_size": 48,
                "moe_intermediate_size": 24,
                "share_expert_dim": 40,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "moe_router_scaling_factor": 3.0,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
                "attention_other_setting": {"num_attention_heads": 6},
                "moe_layers_enum": "1,2,3",
                "rope_theta": [5e6, 1e4, 1e4, 5e6],
                "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 32.0,
                    "original_max_position_embeddings": 64,
                },
                "swiglu_limits": [0.0, 0.0, 4.0, 7.0],
                "swiglu_limits_shared": [3.0, 0.0, 0.0, 16.0],
            },
            vision_config={
                "width": 16,
                "layers": 1,
                "heads": 2,
                "mlp_ratio": 1.0,
                "image_size": 28,
                "patch_size": 14,
            },
        ),
        transformers.Step3p7ForConditionalGeneration,
        # The clamps are at 7 and 16.
        louder={
            "experts.gate_up_proj": 6.0,
            "shared_experts.gate_proj": 12.0,
            "shared_experts.up_proj": 12.0,
        },
        centered=True,
    ),
    "qwen3_5": Family(
        lambda: transformers.Qwen3_5TextConfig(
            **{**QWEN3_5, "linear_num_value_heads": 6}, intermediate_size=48
        ),
        transformers.Qwen3_5ForCausalLM,
        louder=LONGER,
        centered=True,
    ),
    "qwen3_5_moe": Family(
        lambda: transformers.Qwen3_5MoeTextConfig(**QWEN3_5, **SHARED_EXPERT),
        transformers.Qwen3_5MoeForCausalLM,
        louder=LONGER,
        centered=True,
    ),
    "qwen3_next": Family(
        lambda: transformers.Qwen3NextConfig(
            **{**COMMON, **RECURRENT, "max_position_embeddings": 1024},
            **SHARED_EXPERT,
            intermediate_size=48,
            mlp_only_layers=[1],
            norm_topk_prob=False,
            # A dense layer, and attention first: the pattern need not be the published one.
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
        ),
        transformers.Qwen3NextForCausalLM,
        louder=LONGER,
        centered=True,
    ),
}
