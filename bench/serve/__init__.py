"""``python -m bench serve``: a server under load."""
