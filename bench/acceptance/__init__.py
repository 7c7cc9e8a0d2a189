"""``python -m bench acceptance`` and ``profile``: which drafts the target accepts."""
