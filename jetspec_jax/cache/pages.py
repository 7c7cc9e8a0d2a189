"""Constants of pages that the host needs; imports no JAX."""

# Tokens of a page: the attention kernel's step. Pages of 128 were not faster on an H200, and waste more.
PAGE_SIZE = 64
#: A missing page in a block table; any entry outside 0..P - 1 counts as missing.
NO_PAGE = -1


def pages_for(tokens: int) -> int:
    """Pages for ``tokens`` tokens."""
    return -(-tokens // PAGE_SIZE)
