"""Stores of committed tokens, one per layer, and the block that a forward takes in after them."""
