"""Models of several modalities, as transformers saves them, used for text."""

import json

import pytest
import transformers

from jetspec_jax import load_target, logits
from jetspec_jax.inspect.describe import describe
from tests.parity.families import GEMMA3, GEMMA4, GEMMA4_EXPERTS, LONGER, QWEN3_5, SHARED_EXPERT, Family
from tests.parity.oracle import assert_close, assert_recurrent, oracle_logits, random_ids, recurrent_reference

pytestmark = pytest.mark.parity

TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WRAPPERS = {
    "gemma3": Family(
        lambda: transformers.Gemma3Config(
            text_config={**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            vision_config={**TOWER, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        ),
        transformers.Gemma3ForConditionalGeneration,
        centered=True,
    ),
    "gemma4": Family(
        lambda: transformers.Gemma4Config(
            text_config={**GEMMA4, **GEMMA4_EXPERTS},
            vision_config={**TOWER, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
            audio_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        transformers.Gemma4ForConditionalGeneration,
    ),
    "qwen3_5_moe": Family(
        lambda: transformers.Qwen3_5MoeConfig(
            text_config={**QWEN3_5, **SHARED_EXPERT, "eos_token_id": 5},
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
        ),
        transformers.Qwen3_5MoeForConditionalGeneration,
        louder=LONGER,
        centered=True,
    ),
}
SKIPPED = {
    "gemma3": {"vision tower", "projector of images"},
    "gemma4": {"vision tower", "audio tower"},
    "qwen3_5_moe": {"vision tower"},
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_text(tmp_path, name):
    model = WRAPPERS[name].build()
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == name
    target = load_target(tmp_path, dtype="float32")
    assert target.config.model_type == raw["text_config"]["model_type"] == f"{name}_text"
    assert target.eos_token_ids == (raw["text_config"]["eos_token_id"],)
    assert set(describe(tmp_path)["unused_tensors"]) == SKIPPED[name]
    ids = random_ids(0, 2, 33)
    ours, theirs = logits(target, ids), oracle_logits(model, ids)
    if any(layer.recurrence for layer in target.config.layers):
        assert_recurrent(ours, theirs, recurrent_reference(tmp_path, ids))
    else:
        assert_close(ours, theirs)
