"""``python -m bench kernel``."""
