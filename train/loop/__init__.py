"""The training loop and its parts, for heads and targets."""
