"""A disk that is full, in effect."""

import contextlib
import resource


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a full disk: writing beyond so many bytes of a file fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
