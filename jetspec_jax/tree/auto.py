"""The algorithm "auto", which chooses the budget; another algorithm shapes the trees."""

from dataclasses import dataclass

from jetspec_jax.tree.algorithms import Algorithm, Plan, algorithm_of, get_algorithm, register_algorithm
from jetspec_jax.tree.candidates import Candidates
from jetspec_jax.tree.published import DEFAULT_ALGORITHM
from jetspec_jax.tree.routing import Routing

_USUAL = get_algorithm(DEFAULT_ALGORITHM)


@register_algorithm("auto")
@dataclass(frozen=True)
class Auto(Algorithm):
    """Trees of the size that pays, up to the budget, or plain decoding; the engine chooses for each round.

    The engine compares the tokens that a round of each bucket is expected to commit with the round's time on
    this device: see `jetspec_jax.engine.policy`. Outside of an engine this is the algorithm ``tree``.

    Attributes:
        tree: The algorithm that shapes the trees: a name, or an algorithm with its options.
        probing: Share of the time that may be spent on measuring buckets that do not look best.
    """

    tree: str | Algorithm = _USUAL
    probing: float = 0.01

    def __post_init__(self) -> None:
        if isinstance(self.shape, Auto):
            raise ValueError("auto needs another algorithm for the shape of its trees")
        if not 0 <= self.probing <= 1:
            raise ValueError(f"probing must be a share in 0..1, not {self.probing}")

    @property
    def shape(self) -> Algorithm:
        """The algorithm of ``tree``."""
        return algorithm_of(self.tree)

    @property
    def one_by_one(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride] (the other's)
        """As in the algorithm of ``tree``."""
        return self.shape.one_by_one

    @property
    def usual_candidates(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] (the other's)
        """As in the algorithm of ``tree``."""
        return self.shape.usual_candidates

    def plan(self, candidates: Candidates, routing: Routing) -> Plan:
        """The plan of the algorithm of ``tree``."""
        return self.shape.plan(candidates, routing)
