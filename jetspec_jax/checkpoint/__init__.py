"""Loads checkpoints: configs, parameters and tokenizers from a folder, a GGUF file or the hub."""

from jetspec_jax.checkpoint.content import CheckpointError

__all__ = ["CheckpointError"]
