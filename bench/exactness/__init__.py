"""``python -m bench exactness``."""
