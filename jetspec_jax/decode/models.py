"""The models of a program and the devices that share them. Shapes: B slots, P pages, T pages per slot."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import empty_stores
from jetspec_jax.config import ModelConfig
from jetspec_jax.decode.proposer import Proposer, check_proposer, split_proposer
from jetspec_jax.decode.state import DecodeState, DecodeWeights, SlotSettings
from jetspec_jax.device.mesh import WHOLE, as_mesh, everywhere, shardings
from jetspec_jax.device.partition import check_partition, parameter_specs, spread
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import Routing
from pallas_kernels import shards


@dataclass(frozen=True)
class Models:
    """A target, its proposer, and where they run: hashable, equal by value, without arrays.

    Attributes:
        target: The target's geometry.
        proposer: Where draft logits come from; None only decodes plainly.
        implementation: Of tree attention; None picks the best.
        mesh: The devices that share the models, a mesh with the axes "expert" and "tensor", of which one may
            be missing; None is one device. Functions of arrays then see a device's part of each array:
            `on_mesh` makes programs of them.
    """

    target: ModelConfig
    proposer: Proposer | None = None
    _: KW_ONLY
    implementation: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        """Checks that the mesh can split the models.

        Raises:
            TypeError: The mesh is none.
            ValueError: It cannot.
        """
        if not isinstance(self.mesh, AbstractMesh | None):
            # Programs name both axes, and are equal for equal devices.
            object.__setattr__(self, "mesh", as_mesh(self.mesh))
        check_partition(self.target, self.mesh)
        check_proposer(self.proposer, self.mesh)

    @functools.cached_property
    def models(self) -> "Models":
        """The record alone: programs that take it are the same for all settings of a subclass."""
        return Models(self.target, self.proposer, implementation=self.implementation, mesh=self.mesh)

    @property
    def alone(self) -> "Models":
        """The target without its proposer."""
        return Models(self.target, implementation=self.implementation, mesh=self.mesh)

    def empty_state(
        self, slots: int, *, num_pages: int, pages_per_slot: int, page_size: int, dtype: jnp.dtype
    ) -> DecodeState:
        """A state whose slots are all free; on a mesh no device ever holds more than its part.

        Args:
            slots: B.
            num_pages: P, pages in the pool that the slots share.
            pages_per_slot: T, so that a slot holds at most ``T * page_size`` tokens.
            page_size: Tokens in a page.
            dtype: Of the stores: the weights' dtype.
        """
        sizes = slots, num_pages, pages_per_slot, page_size, jnp.dtype(dtype)
        models = self.models
        return _empty_state(models, *sizes) if self.mesh is None else _split_empty_state(models, *sizes)()

    def state_specs(self, state: DecodeState) -> DecodeState:
        """How the mesh splits a state: stores by heads, all else whole on every device."""
        mesh, proposer = self.mesh, self.proposer
        assert mesh is not None
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
        self, function: Callable[..., Any], *, others: Sequence[Any] | None = None, results: Any = None
    ) -> Callable[..., Any]:
        """A function that all devices run, each on its part of weights and state; as it is without a mesh.

        Args:
            function: Takes weights, a state, and others.
            others: How the others are split; None is all of them whole on every device.
            results: How what it returns is put together; None is a state, and what is whole on every device.
        """
        mesh, proposer = self.mesh, self.proposer
        if mesh is None:
            return function

        def run(weights: DecodeWeights, state: DecodeState, *given: Any) -> Any:
            of_proposer = WHOLE if proposer is None else split_proposer(proposer).weight_specs(mesh)
            of_weights = DecodeWeights(parameter_specs(self.target, mesh), of_proposer)
            of_state = self.state_specs(state)
            of_others = [WHOLE] * len(given) if others is None else others
            returned = (of_state, WHOLE) if results is None else results
            specs = of_weights, of_state, *of_others
            return everywhere(mesh, function, specs, returned)(weights, state, *given)

        return run


def _empty_state(
    models: Models, slots: int, num_pages: int, pages_per_slot: int, page_size: int, dtype: jnp.dtype
) -> DecodeState:
    target, proposer, mesh = models.target, models.proposer, models.mesh
    if mesh is not None and proposer is not None:
        proposer = split_proposer(proposer).spread(mesh)
    tables = jnp.full((slots, pages_per_slot), NO_PAGE, jnp.int32)
    free = Slots.of(tables, jnp.zeros(slots, jnp.int32))
    return DecodeState(
        stores=empty_stores(spread(target, mesh), num_pages, page_size, dtype, free),
        proposer=None if proposer is None else proposer.empty_state(num_pages, page_size, dtype),
        slots=free,
        room=jnp.zeros(slots, jnp.int32),
        anchors=jnp.zeros(slots, jnp.int32),
        active=jnp.zeros(slots, bool),
        settings=SlotSettings(
            sampling=Sampling.greedy(slots),
            budget=jnp.ones(slots, jnp.int32),
            depth=jnp.zeros(slots, jnp.int32),
            remaining=jnp.zeros(slots, jnp.int32),
            stop_bits=jnp.zeros((slots, -(-target.vocab_size // 32)), jnp.uint32),
            routing=Routing.unsaid(slots),
        ),
        page_size=page_size,
    )


@functools.cache
def _split_empty_state(models: Models, *sizes: Any) -> Callable[[], DecodeState]:
    """The program that makes an empty state on a mesh, each device its own part."""
    make = functools.partial(_empty_state, models, *sizes)
    assert models.mesh is not None
    specs = models.state_specs(jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings(models.mesh, specs))
