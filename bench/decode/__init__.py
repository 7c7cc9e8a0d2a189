"""``python -m bench decode``."""
