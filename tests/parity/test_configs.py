"""Published configs, and what transformers makes of them in its own dialect, mean the same here."""

import json

import pytest
import transformers

from jetspec_jax.config import parse_model_config
from tests.loading import test_gemma3, test_gemma4, test_llama, test_qwen3_5
from tests.loading.published import without
from tests.loading.test_gpt_oss import GPT_OSS_20B
from tests.loading.test_qwen3_moe import OLDER, QWEN3_30B_A3B
from tests.loading.test_step import HUB_TEXT, wrapped

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
    ("theirs", "raw"),
    [
        (transformers.LlamaConfig, test_llama.LLAMA_2_7B),
        (transformers.LlamaConfig, test_llama.LLAMA_3_1_8B),
        (transformers.LlamaConfig, test_llama.SMOLLM2_135M),
        (transformers.MistralConfig, test_llama.MISTRAL_7B),
        (transformers.MistralConfig, {**test_llama.MISTRAL_7B, "sliding_window": None}),
        (transformers.Qwen2Config, test_llama.QWEN2_5_7B),
        (transformers.GptOssConfig, GPT_OSS_20B),
        (transformers.GptOssConfig, without(GPT_OSS_20B, "rope_scaling", "rope_theta")),
        (transformers.GptOssConfig, {**GPT_OSS_20B, "rope_scaling": None, "rope_theta": 2e5}),
        (transformers.GptOssConfig, {**without(GPT_OSS_20B, "rope_theta"), "rope_scaling": {}}),
        (transformers.GptOssConfig, {**without(GPT_OSS_20B, "rope_scaling"), "rope_parameters": {}}),
        (transformers.Step3p7Config, wrapped(HUB_TEXT)),
        (transformers.Qwen3MoeConfig, QWEN3_30B_A3B),
        (transformers.Qwen3MoeConfig, OLDER),
        (
            transformers.Qwen3MoeConfig,
            without(OLDER, "decoder_sparse_step", "norm_topk_prob", "use_sliding_window"),
        ),
        (transformers.Gemma3TextConfig, test_gemma3.OLDER),
        (transformers.Gemma3Config, test_gemma3.PUBLISHED_4B),
        (transformers.Gemma4TextConfig, test_gemma4.PUBLISHED),
        (transformers.Qwen3_5TextConfig, test_qwen3_5.TEXT_27B),
        (transformers.Qwen3_5MoeTextConfig, test_qwen3_5.TEXT_35B),
        (transformers.Qwen3_5MoeConfig, test_qwen3_5.wrapped(test_qwen3_5.TEXT_35B)),
        (transformers.Qwen3NextConfig, test_qwen3_5.NEXT_80B),
    ],
)
def test_translation(tmp_path, theirs, raw):
    # transformers takes what it gets apart.
    theirs(**json.loads(json.dumps(raw))).save_pretrained(tmp_path)
    translated = json.loads((tmp_path / "config.json").read_text())
    assert parse_model_config(translated) == parse_model_config(raw)
