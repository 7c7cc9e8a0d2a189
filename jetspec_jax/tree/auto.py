"""The algorithm that chooses the budget, and leaves the shape of the trees to another."""

from dataclasses import dataclass

from jetspec_jax.tree.algorithms import Algorithm, Plan, algorithm_of, get_algorithm, register_algorithm
from jetspec_jax.tree.candidates import Candidates
from jetspec_jax.tree.published import DEFAULT_ALGORITHM
from jetspec_jax.tree.routing import Routing

_USUAL = get_algorithm(DEFAULT_ALGORITHM)


@register_algorithm("auto")
@dataclass(frozen=True)
class Auto(Algorithm):
    """Trees of as many nodes as pay, up to the budget, or none at all: the engine chooses while it decodes.

    It weighs how many tokens a round of each bucket is expected to commit against what the round costs on
    this device: see `jetspec_jax.engine.budget_policy`. Outside of an engine it is the algorithm below.

    Attributes:
        tree: The algorithm that shapes the trees: a name, or one with its options.
        probing: Share of the time that may be lost to rounds with buckets that do not look best, to find out.
    """

    tree: str | Algorithm = _USUAL
    probing: float = 0.01

    def __post_init__(self) -> None:
        """Checks the options.

        Raises:
            ValueError: The tree is not an algorithm or chooses budgets itself, or the share is not in 0..1.
        """
        if isinstance(self.shape, Auto):
            raise ValueError("auto needs another algorithm for the shape of its trees")
        if not 0 <= self.probing <= 1:
            raise ValueError(f"probing must be a share in 0..1, not {self.probing}")

    @property
    def shape(self) -> Algorithm:
        """The algorithm that shapes the trees."""
        return algorithm_of(self.tree)

    @property
    def one_by_one(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] (the other's)
        """As the algorithm below."""
        return self.shape.one_by_one

    @property
    def usual_candidates(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] (the other's)
        """As the algorithm below."""
        return self.shape.usual_candidates

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """The plan of the algorithm below."""
        return self.shape.plan(candidates, routing)
