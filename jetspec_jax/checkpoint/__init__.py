"""Checkpoints in safetensors: from a folder or the hub to parameters, and the tokenizer beside them."""

from jetspec_jax.checkpoint.content import CheckpointError

__all__ = ["CheckpointError"]
