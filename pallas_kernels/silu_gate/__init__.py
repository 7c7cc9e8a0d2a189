"""The gate of a gated feed-forward block."""

from pallas_kernels.silu_gate.api import implementations, silu_gate

__all__ = ["implementations", "silu_gate"]
