"""The experts of a mixture: each token's gated blocks, weighted and summed."""

from pallas_kernels.expert_mlp.api import expert_mlp, implementations

__all__ = ["expert_mlp", "implementations"]
