"""Rows in FP8, with a scale for each group of neighbouring terms."""

from pallas_kernels.quantize_rows.api import implementations, quantize_rows

__all__ = ["implementations", "quantize_rows"]
