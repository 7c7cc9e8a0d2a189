"""``python -m bench load``: an engine under load."""
