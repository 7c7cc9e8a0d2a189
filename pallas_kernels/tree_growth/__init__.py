"""Best-first growth of token trees."""

from pallas_kernels.tree_growth.api import implementations, tree_growth
from pallas_kernels.tree_growth.reference import Growth

__all__ = ["Growth", "implementations", "tree_growth"]
