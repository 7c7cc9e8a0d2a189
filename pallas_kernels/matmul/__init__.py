"""Products of rows with weights, quantised or not."""

from pallas_kernels.matmul.api import implementations, matmul

__all__ = ["implementations", "matmul"]
