"""``python -m bench kernel --operation experts``."""
