"""Root-mean-square norm of rows, and the residual sum before it."""

from pallas_kernels.rms_norm.api import implementations, rms_norm

__all__ = ["implementations", "rms_norm"]
