"""``python -m bench acceptance``, ``profile``, ``diagnose``: which drafts the target accepts."""
