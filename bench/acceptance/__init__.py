"""``python -m bench acceptance``, ``profile``, ``diagnose``: what of the head's drafts the target takes."""
