"""Draws trees: one round in the terminal, or a whole generation as a page (``jetspec-jax tree``)."""
