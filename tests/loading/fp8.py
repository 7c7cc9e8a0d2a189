"""FP8 checkpoints as others publish them, made and widened by NumPy from the published layouts.

A matrix ``[outputs, inputs]`` and its scales: of blocks (Qwen's "fp8", ``weight_scale_inv``), or of outputs
(compressed-tensors, ``weight_scale``). Embeddings, logits, norms and routers stay as they are.
"""

import json

import ml_dtypes
import numpy as np

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def blocks(*size, **settings):
    """Qwen's quantization_config."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [*size],
        **settings,
    }


def channels(weights=(), **settings):
    """llm-compressor's quantization_config of FP8 with dynamic activations."""
    own = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "channel",
        "symmetric": True,
        "type": "float",
        **dict(weights),
    }
    inputs = {**own, "dynamic": True, "observer": None, "strategy": "token"}
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": own}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **settings,
    }


def is_quantised(name, shape):
    """Whether published checkpoints quantise a tensor."""
    left_out = ("embed_tokens", "lm_head", "mlp.gate.", "conv1d", "router", "moe.gate.weight")
    return len(shape) > 1 and not any(own in name for own in left_out)


def quantised(tensors, config, scale_dtype=np.float32, chosen=is_quantised):
    """The tensors of a checkpoint in FP8."""
    made = {}
    for name, tensor in tensors.items():
        if not chosen(name, tensor.shape):
            made[name] = tensor
            continue
        block = block_of(tensor.shape, config)
        scales = np.empty(
            (*tensor.shape[:-2], *(-(-n // b) for n, b in zip(tensor.shape[-2:], block, strict=True))),
            scale_dtype,
        )
        values = np.empty(tensor.shape, FP8)
        for place, box in boxes(scales.shape, block):
            scales[place] = np.abs(tensor[box]).max() / 448
            values[box] = (tensor[box] / scales[place].astype(np.float32)).astype(FP8)
        made[name], made[scale_name(name, config)] = values, scales
    return made


def widened(tensors, config):
    """The tensors of a checkpoint as they are meant: value times scale, in float32."""
    made = {}
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            scales, wide = tensors[scale_name(name, config)], np.empty(tensor.shape, np.float32)
            for place, box in boxes(scales.shape, block_of(tensor.shape, config)):
                wide[box] = tensor[box].astype(np.float32) * scales[place].astype(np.float32)
            made[name] = wide
        elif not name.endswith(("_scale_inv", "_scale")):
            made[name] = tensor
    return made


def load(path):
    """All tensors of a file: the library's own reader of NumPy arrays knows no FP8."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    types = {"F8_E4M3": FP8, "F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
    header, tensors = json.loads(content[8:start]), {}
    header.pop("__metadata__", None)
    for name, own in header.items():
        data = content[start:][slice(*own["data_offsets"])]
        tensors[name] = np.frombuffer(data, types[own["dtype"]]).reshape(own["shape"])
    return tensors


def scale_name(name, config):
    return name + ("_scale_inv" if config["quant_method"] == "fp8" else "_scale")


def block_of(shape, config):
    return tuple(config["weight_block_size"]) if config["quant_method"] == "fp8" else (1, shape[-1])


def boxes(counts, block):
    """Each scale's place, and the weights that it is for."""
    for place in np.ndindex(counts):
        rows, columns = (slice(i * b, (i + 1) * b) for i, b in zip(place[-2:], block, strict=True))
        yield place, (*place[:-2], rows, columns)
