"""HTTP before the engine (`jetspec-jax serve`)."""
