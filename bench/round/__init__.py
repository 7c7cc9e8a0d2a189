"""``python -m bench round``."""
