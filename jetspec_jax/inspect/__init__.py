"""Inspection of models and decoding: forwards, traced rounds, near-ties, and checkpoints."""
