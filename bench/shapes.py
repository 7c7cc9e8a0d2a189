"""Shapes that people run, by name: a target and a draft head whose weights need not exist."""

from typing import NamedTuple

from jetspec_jax.config import DraftHeadConfig, ModelConfig, default_tap_layers


class Shape(NamedTuple):
    """A target and a draft head that fits it."""

    target: ModelConfig
    head: DraftHeadConfig


def _qwen3(
    *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int = 8, tied: bool = False
) -> Shape:
    """A published Qwen3, with a head of five layers as the published heads have them."""
    geometry = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    }
    target = ModelConfig(**geometry, tie_word_embeddings=tied, windows=(None,) * layers)
    own = ModelConfig(**geometry, tie_word_embeddings=False, windows=(None,) * 5)
    # The mask token is one of the ids that Qwen3's tokenizer leaves free.
    return Shape(target, _head(own, layers, block_size=16, mask_token_id=151669))


def _head(
    own: ModelConfig, num_target_layers: int, *, block_size: int, mask_token_id: int
) -> DraftHeadConfig:
    return DraftHeadConfig(
        layers=own,
        block_size=block_size,
        num_target_layers=num_target_layers,
        tap_layers=tuple(default_tap_layers(own.num_layers, num_target_layers)),
        mask_token_id=mask_token_id,
        causal=True,
    )


def _tiny() -> Shape:
    """Seconds on a CPU: it shows that a benchmark runs, not how fast anything is."""
    geometry = {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    target = ModelConfig(**geometry, windows=(None, None))
    return Shape(target, _head(ModelConfig(**geometry, windows=(None,)), 2, block_size=8, mask_token_id=511))


SHAPES = {
    "tiny": _tiny(),
    "qwen3-0.6b": _qwen3(layers=28, hidden=1024, intermediate=3072, heads=16, tied=True),
    "qwen3-1.7b": _qwen3(layers=28, hidden=2048, intermediate=6144, heads=16, tied=True),
    "qwen3-4b": _qwen3(layers=36, hidden=2560, intermediate=9728, heads=32, tied=True),
    "qwen3-8b": _qwen3(layers=36, hidden=4096, intermediate=12288, heads=32),
    "qwen3-14b": _qwen3(layers=40, hidden=5120, intermediate=17408, heads=40),
    "qwen3-32b": _qwen3(layers=64, hidden=5120, intermediate=25600, heads=64),
}


def find_shape(name: str) -> Shape:
    """The shape of a name.

    Raises:
        ValueError: There is none.
    """
    if name not in SHAPES:
        raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, not {name!r}")
    return SHAPES[name]
