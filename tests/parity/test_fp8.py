"""FP8 checkpoints as transformers reads them, dequantised."""

import json

import pytest
import torch
import transformers

from jetspec_jax import load_target, logits
from tests.loading.fp8 import blocks, quantised
from tests.loading.published import write
from tests.parity.oracle import assert_close, oracle_logits, random_ids, random_model

pytestmark = pytest.mark.parity


def test_logits_are_those_of_the_dequantised_model(tmp_path):
    # transformers dequantises whole blocks only.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    model = random_model(num_attention_heads=4, num_key_value_heads=2, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(0.3)  # so that logits are of size 1
    model.save_pretrained(tmp_path / "plain")
    raw = json.loads((tmp_path / "plain" / "config.json").read_text())
    tensors = {name: own.numpy() for name, own in model.state_dict().items()}
    config = blocks(128, 128, modules_to_not_convert=["lm_head"])
    folder = write(tmp_path / "fp8", {**raw, "quantization_config": config}, quantised(tensors, config))
    theirs, loading = transformers.Qwen3ForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=["lm_head"]
        ),
    )
    assert not any(loading.values())
    ids = random_ids(0, 2, 20)
    ours, expected = logits(load_target(folder, dtype="float32"), ids), oracle_logits(theirs, ids)
    assert_close(ours, expected)
    # Which is not the model before it was quantised.
    with pytest.raises(AssertionError):
        assert_close(oracle_logits(model, ids), expected)
