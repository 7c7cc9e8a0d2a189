"""Tiny GGUF files of each architecture, made of Hugging Face tensors by llama.cpp's conventions.

Written by hand from what its converter does, with the package's own table of names, so that the library's
tables are not their own judge.
"""

import gguf
import numpy as np

from jetspec_jax.checkpoint.tensor_plan import expected_parameters
from jetspec_jax.config import parse_model_config

Kind = gguf.GGMLQuantizationType

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
#: Configs in the words of their families, by what their files are.
CONFIGS = {
    "llama": {**COMMON, "model_type": "llama", "rope_scaling": LLAMA3},
    "llama_biased": {**COMMON, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {**COMMON, "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**COMMON, "model_type": "qwen2", "head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {**COMMON, "model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3moe": {
        **COMMON,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "gemma3": {
        **COMMON,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}
#: What llama.cpp calls the families.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}


def random_tensors(raw, seed=0):
    """Hugging Face tensors of a config: about 0, but norms about 1 where the family does not add it."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for parameter in expected_parameters(parse_model_config(raw)):
        for key in parameter.forms[0]:
            noise = 0.2 * rng.normal(size=key.file_shapes(parameter.shape)[0])
            one = "norm" in key.name and raw["model_type"] != "gemma3_text"
            tensors[key.name] = (noise + one).astype(np.float32)
    return tensors


def write_gguf(path, raw, tensors, *, kind=Kind.F32, metadata=None, extra=None):
    """Writes a file."""
    name = ARCHITECTURES[raw["model_type"]]
    writer = gguf.GGUFWriter(path, name)
    given = {**metadata_of(raw, name), **(metadata or {})}
    for key, value in given.items():
        if value is not None:
            _add(writer, key, value)
    for own, tensor in {**renamed(raw, name, tensors), **(extra or {})}.items():
        if tensor.ndim > 1 and own.startswith("blk.") and kind is not Kind.F32:
            writer.add_tensor(own, gguf.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(own, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata_of(raw, name):
    """What llama.cpp's converter writes of a config."""
    own = {
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "block_count": raw["num_hidden_layers"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": raw["num_attention_heads"],
        "attention.head_count_kv": raw["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        "attention.key_length": raw["head_dim"],
        "attention.value_length": raw["head_dim"],
        "rope.freq_base": raw["rope_theta"],
        "vocab_size": raw["vocab_size"],
    }
    if name == "llama":
        own["rope.dimension_count"] = raw["head_dim"]
    if "sliding_window" in raw:
        own["attention.sliding_window"] = raw["sliding_window"]
    if (scaling := raw["rope_scaling"]) and scaling["rope_type"] == "linear":
        own |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
    if "num_experts" in raw:
        own |= {
            "expert_count": raw["num_experts"],
            "expert_used_count": raw["num_experts_per_tok"],
            "expert_feed_forward_length": raw["moe_intermediate_size"],
        }
    return {f"{name}.{key}": value for key, value in own.items()}


def renamed(raw, name, tensors):
    """Hugging Face tensors under llama.cpp's names, changed as its converter changes them."""
    [architecture] = [own for own, text in gguf.MODEL_ARCH_NAMES.items() if text == name]
    names = gguf.get_tensor_name_map(architecture, raw["num_hidden_layers"])
    found = {}
    for given, tensor in tensors.items():
        stem, _, suffix = given.rpartition(".")
        if ".experts." in stem:
            before, _, after = stem.partition(".experts.")
            number, _, projection = after.partition(".")
            own = names.get_name(f"{before}.experts.{projection}")
            found.setdefault(f"{own}.{suffix}", {})[int(number)] = tensor
            continue
        own = f"{names.get_name(stem)}.{suffix}"
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(own.split(".")[-2])
        if name == "llama" and heads:
            tensor = interleaved(tensor, raw[heads])
        if name == "gemma3" and "norm" in own:
            tensor = tensor + np.float32(1)
        found[own] = tensor
    if name == "llama" and (scaling := raw["rope_scaling"]):
        found["rope_freqs.weight"] = llama3_factors(raw["rope_theta"], raw["head_dim"], scaling)
    return {
        own: np.stack([tensor[i] for i in range(len(tensor))]) if isinstance(tensor, dict) else tensor
        for own, tensor in found.items()
    }


def interleaved(tensor, heads):
    """Rows in the order of interleaved rotary embeddings: those that turn together side by side."""
    size = len(tensor) // heads
    order = [
        head * size + half * size // 2 + i
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return tensor[order]


def llama3_factors(theta, head_dim, scaling):
    """What Llama 3's frequencies are divided by, pair by pair, in float32."""
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(scaling["factor"])
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def _add(writer, key, value):
    """Adds metadata of the type that llama.cpp's converter gives it."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
