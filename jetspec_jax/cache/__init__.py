"""Stores of committed tokens, one per layer, and the block of tokens that a forward processes after them."""
