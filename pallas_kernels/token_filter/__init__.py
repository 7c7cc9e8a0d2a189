"""The smallest logit of each row that top-k, top-p and min-p keep."""

from pallas_kernels.token_filter.api import implementations, least_kept

__all__ = ["implementations", "least_kept"]
