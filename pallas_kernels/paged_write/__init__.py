"""Rows of many blocks, written into the pages of as many pools at once."""

from pallas_kernels.paged_write.api import implementations, paged_write

__all__ = ["implementations", "paged_write"]
