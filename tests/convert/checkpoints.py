"""Tiny checkpoints with every bit pattern, and raw comparisons that know nothing of the library."""

import json

import ml_dtypes
import numpy as np
from safetensors import safe_open

from convert.folders import locate
from tests.loading.published import HEAD, V4, V5, head_shapes, target_shapes, write

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
SMALL = {"num_hidden_layers": 2, "max_window_layers": 2}
UNTIED = {**V4, **SMALL}
NEWER = {**V5, **SMALL, "layer_types": ["full_attention"] * 2}
TIED = {**UNTIED, "tie_word_embeddings": True}
DRAFT = {
    **HEAD,
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "dflash_config": {"causal_head": True, "mask_token_id": 18, "target_layer_ids": [0, 1]},
}
SELECTING = {**DRAFT, "dflash_config": {**DRAFT["dflash_config"], "selector_rank": 3, "selector_top_k": 4}}


def shapes_of(raw):
    return (head_shapes if "dflash_config" in raw else target_shapes)(raw)


def random_bits(shapes, dtype, seed=0):
    """Tensors of random bits: NaNs with payloads, infinities, subnormals and both zeros are among them."""
    rng = np.random.default_rng(seed)
    size = DTYPES[dtype].itemsize

    def draw(shape):
        bits = rng.integers(256, size=(*shape[:-1], shape[-1] * size), dtype=np.uint8)
        return bits.view(DTYPES[dtype])

    return {name: draw(shape) for name, shape in shapes.items()}


def random_values(shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * (0.2 if len(shape) > 1 else 1)).astype(DTYPES[dtype])
        for name, shape in shapes.items()
    }


def make(folder, raw, tensors, sharded=False):
    """A Hugging Face folder with a tokenizer's files, and some that no conversion keeps."""
    names = sorted(tensors)
    shards = [{name: tensors[name] for name in names[i::2]} for i in range(2)] if sharded else [tensors]
    write(folder, raw, *shards)
    # Spaces and order are part of a file that is kept byte for byte.
    (folder / "config.json").write_text(json.dumps(raw, indent=3, sort_keys=True) + "\n\n")
    for name, content in OTHER_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for name in ("README.md", "modeling.py", "optimizer.pt"):
        (folder / name).write_bytes(b"not kept")
    return folder


OTHER_FILES = {
    "generation_config.json": b'{"eos_token_id": 3}',
    "vocab.json": '{"é": 0}'.encode(),
    "merges.txt": b"a b\r\n",
    "chat_template.jinja": b"{{ messages }}",
    "tokenizer.model": bytes(range(256)),
    "special_tokens_map.json": b"{ }",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
}


def of_any_bits(folder):
    """A checkpoint whose values may be NaN."""
    return locate(folder, allow_nonfinite=True)


def read_raw(folder):
    """Name to type, shape and bytes of every stored tensor of all safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert name not in found
                tensor = file.get_tensor(name)
                found[name] = (tensor.dtype, tensor.shape, tensor.tobytes())
    return found


def files_of(folder):
    """Name to content of every file beside the weights."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }
