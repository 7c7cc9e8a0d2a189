"""The activation of a gated feed-forward block."""

from pallas_kernels.gated_activation.api import gated_activation, implementations

__all__ = ["gated_activation", "implementations"]
