"""A family that is registered here, against transformers: Granite, which is Llama with four factors."""

from dataclasses import dataclass, replace

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from jetspec_jax import load_target, logits, register_family
from jetspec_jax.config import ModelConfig, llama
from jetspec_jax.models.llama import Llama, LlamaLayer
from tests.parity.oracle import VOCAB, assert_close, oracle_logits, random_ids

pytestmark = pytest.mark.parity


@dataclass(frozen=True)
class Config(ModelConfig):
    residual: float = 1.0
    logits_scaling: float = 1.0


def read(fields):
    own = {name: fields.positive(f"{name}_multiplier") for name in ("embedding", "attention", "residual")}
    config = llama.read(fields)
    layers = tuple(replace(layer, attention_scale=own["attention"]) for layer in config.layers)
    changes = {"layers": layers, "embedding_scale": own["embedding"], "residual": own["residual"]}
    return Config(**vars(config) | changes, logits_scaling=fields.positive("logits_scaling"))


class GraniteLayer(LlamaLayer):
    def __init__(self, config, layer, **options):
        super().__init__(config, layer, **options)
        self.residual = config.residual

    def mix(self, normed, positions, attend):
        mixed, rows = super().mix(normed, positions, attend)
        return self.residual * mixed, rows

    def feed(self, x, attended):
        x, delta = super().feed(x, attended)
        return x, self.residual * delta


class Granite(Llama):
    LAYER = GraniteLayer

    def logits(self, hidden, *, capped=True):
        return super().logits(hidden, capped=capped) / self.config.logits_scaling


def test_granite(tmp_path):
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=0.2,
        initializer_range=0.2,
    )
    model = GraniteForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "granite")
    register_family("granite", read=read, module=Granite)
    ids = random_ids(0, 2, 23)
    assert_close(logits(load_target(tmp_path / "granite", dtype="float32"), ids), oracle_logits(model, ids))
