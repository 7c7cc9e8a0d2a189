"""``python -m bench profile`` and ``diagnose``: what of the head's drafts the target takes."""
