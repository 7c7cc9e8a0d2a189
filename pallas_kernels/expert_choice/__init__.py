"""A router's choice of experts, and their weights."""

from pallas_kernels.expert_choice.api import expert_choice, implementations
from pallas_kernels.expert_choice.reference import ExpertChoice, RouterRule

__all__ = ["ExpertChoice", "RouterRule", "expert_choice", "implementations"]
