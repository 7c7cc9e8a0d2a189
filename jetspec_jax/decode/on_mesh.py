"""Programs of a state on a mesh: how weights and state are split, and a function that all devices run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh

from jetspec_jax.config import ModelConfig
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.state import DecodeState, DecodeWeights
from jetspec_jax.device.mesh import WHOLE, everywhere
from jetspec_jax.device.partition import parameter_specs
from pallas_kernels import shards


@runtime_checkable
class SplitProposer(Proposer, Protocol):
    """A proposer that can run on a mesh: it says how its arrays are split."""

    def spread(self, mesh: Mesh) -> Proposer:
        """The proposer that makes an empty state as large as it lies on a mesh."""
        ...

    def weight_specs(self, mesh: Mesh) -> Any:
        """How its parameters are split: specs in their structure, or for whole branches of it."""
        ...

    def state_specs(self, state: Any, mesh: Mesh) -> Any:
        """How its state is split: likewise."""
        ...


def check_proposer(proposer: Proposer | None, mesh: Mesh | None) -> None:
    """Checks that a proposer can run on a mesh.

    Raises:
        ValueError: It does not say how it is split.
    """
    if mesh is not None and proposer is not None and not isinstance(proposer, SplitProposer):
        raise ValueError(
            f"{type(proposer).__name__} does not say how a mesh splits it: it needs the methods of "
            "jetspec_jax.decode.on_mesh.SplitProposer"
        )


def state_specs(proposer: Proposer | None, state: DecodeState, mesh: Mesh) -> DecodeState:
    """How a state is split: stores by heads, all else whole on every device."""
    own = WHOLE if proposer is None else split_proposer(proposer).state_specs(state.proposer, mesh)
    return replace(
        state,
        stores=tuple(store.specs(shards.ALL) for store in state.stores),
        proposer=own,
        slots=WHOLE,
        room=WHOLE,
        anchors=WHOLE,
        active=WHOLE,
        settings=WHOLE,
        adjust=WHOLE,
    )


def on_mesh(
    mesh: Mesh | None,
    target: ModelConfig,
    proposer: Proposer | None,
    function: Callable[..., Any],
    *,
    others: Sequence[Any] | None = None,
    results: Any = None,
) -> Callable[..., Any]:
    """A function that all devices run, each on its part of weights and state; as it is without a mesh.

    Args:
        mesh: The devices.
        target: The target's geometry.
        proposer: The proposer.
        function: Takes weights, a state, and others.
        others: How the others are split; None is all of them whole on every device.
        results: How what it returns is put together; None is a state, and what is whole on every device.
    """
    if mesh is None:
        return function

    def run(weights: DecodeWeights, state: DecodeState, *given: Any) -> Any:
        of_proposer = WHOLE if proposer is None else split_proposer(proposer).weight_specs(mesh)
        of_weights = DecodeWeights(parameter_specs(target, mesh), of_proposer)
        of_state = state_specs(proposer, state, mesh)
        of_others = [WHOLE] * len(given) if others is None else others
        returned = (of_state, WHOLE) if results is None else results
        specs = of_weights, of_state, *of_others
        return everywhere(mesh, function, specs, returned)(weights, state, *given)

    return run


def split_proposer(proposer: Proposer) -> SplitProposer:
    """A proposer of a mesh, which `check_proposer` has checked."""
    assert isinstance(proposer, SplitProposer)
    return proposer
