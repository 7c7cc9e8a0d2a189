"""Benchmarks, run from a checkout as ``python -m bench``."""
