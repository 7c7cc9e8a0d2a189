"""A router's choice of experts, and their weights."""

from pallas_kernels.expert_choice.api import expert_choice, implementations
from pallas_kernels.expert_choice.reference import Choice, Routing

__all__ = ["Choice", "Routing", "expert_choice", "implementations"]
