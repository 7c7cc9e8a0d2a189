"""Training of targets and draft heads: a program on top of `jetspec_jax`, run as ``python -m train``."""
