"""From a fused projection to normed, rotated queries and keys, and values."""

from pallas_kernels.qkv_rotary.api import implementations, qkv_rotary

__all__ = ["implementations", "qkv_rotary"]
