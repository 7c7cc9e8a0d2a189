"""Attention of a small block with an inner mask over a committed prefix that is read from pages."""

from pallas_kernels.tree_attention.api import check_implementation, implementations, tree_attention
from pallas_kernels.tree_attention.reference import PagedPrefix

__all__ = ["PagedPrefix", "check_implementation", "implementations", "tree_attention"]
