"""Tiny GGUF files of each architecture, as transformers reads them: it maps tensors and tokens by itself."""

import numpy as np
import pytest
import torch
import transformers
from tokenizers import normalizers

from jetspec_jax import load_target, logits
from tests.loading.gguf_files import CONFIGS, Kind, random_tensors, write_gguf
from tests.loading.test_gguf_tokenizer import byte_level, sentence_piece
from tests.parity.oracle import assert_close, oracle_logits

pytestmark = pytest.mark.parity

# Keys that transformers makes no use of in a file, and what its model has to be told for that.
UNREAD = {
    "llama": {"rope_parameters": {**CONFIGS["llama"]["rope_scaling"], "rope_theta": 5e5}},
    "llama_biased": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"head_dim": 32},
    "qwen3moe": {"moe_intermediate_size": 32},
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(tmp_path, name, kind):
    raw = CONFIGS[name]
    path = write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw), kind=kind)
    model = theirs(path, name)
    ids = np.random.default_rng(0).integers(0, raw["vocab_size"], (2, 40)).astype(np.int32)
    assert_close(logits(load_target(path, dtype="float32"), ids), oracle_logits(model, ids))


def theirs(path, name):
    """transformers' model of a file."""
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    for key, value in UNREAD.get(name, {}).items():
        setattr(config, key, value)
    eager = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, **eager
    )
    if name == "mistral":
        # To transformers it is a Llama, whose tensors have the same names; the window is in the file alone.
        read = model.state_dict()
        config = transformers.MistralConfig(
            **{**config.to_dict(), "model_type": "mistral", "sliding_window": 8}
        )
        model = transformers.MistralForCausalLM._from_config(config, **eager)
        model.load_state_dict(read)
    return model.eval()


TEXTS = [
    "abc ab",
    "a 12\n  3's b!",
    "Größe  naïve\n\n\t漢字 🙂 12345\r\n",
    "ab<|end|>c <think>",
    "e\u0301",
    "¿?!... --x",
]


@pytest.mark.parametrize(
    ("name", "metadata"),
    [
        *(("llama", byte_level(ggml__pre=pre)) for pre in ("llama-bpe",)),
        ("qwen2", byte_level(ggml__pre="qwen2")),
        ("llama", sentence_piece(0)),
        ("gemma3", sentence_piece(1, ggml__add_space_prefix=False)),
    ],
)
def test_ids(tmp_path, name, metadata):
    """Of the pre-tokenizers that transformers' own path knows."""
    raw = {**CONFIGS[name], "vocab_size": len(metadata["ggml.tokens"])}
    given = {f"tokenizer.{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw), metadata=given)
    ours = load_target(path, dtype="float32").tokenizer
    other = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    if name == "qwen2":  # as the tokenizer that Qwen publishes
        other.backend_tokenizer.normalizer = normalizers.NFC()
    for text in TEXTS:
        ids = other.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == other.decode(ids), text
