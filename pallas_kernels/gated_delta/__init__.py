"""The gated delta rule over a chain or a tree of tokens, and the state after a path of them."""

from pallas_kernels.gated_delta.api import advance, gated_delta, implementations
from pallas_kernels.gated_delta.reference import SOLVED, GatedDelta

__all__ = ["SOLVED", "GatedDelta", "advance", "gated_delta", "implementations"]
