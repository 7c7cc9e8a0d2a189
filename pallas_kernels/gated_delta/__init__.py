"""The gated delta rule over a chain or a tree of tokens, and the state after a path of them."""

from pallas_kernels.gated_delta.api import advance, gated_delta, implementations
from pallas_kernels.gated_delta.reference import GatedDelta

__all__ = ["GatedDelta", "advance", "gated_delta", "implementations"]
