"""``python -m bench loading``."""
