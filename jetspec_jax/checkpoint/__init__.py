"""Checkpoints in safetensors: from a folder or the hub to parameters, and the tokenizer beside them."""
