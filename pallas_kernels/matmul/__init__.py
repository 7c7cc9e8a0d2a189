"""Products of rows with quantised weights."""

from pallas_kernels.matmul.api import implementations, matmul

__all__ = ["implementations", "matmul"]
