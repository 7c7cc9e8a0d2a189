"""Trees for people: one round in the terminal, a whole generation as a page (``jetspec-jax tree``)."""
