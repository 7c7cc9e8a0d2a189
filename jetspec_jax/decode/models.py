"""The models of a program and their devices. Shapes: B slots, P pages, T pages per slot."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

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
    """A target, its proposer and their devices; hashable, compared by value, without arrays.

    Attributes:
        target: The target's geometry.
        proposer: The source of draft logits; None allows only plain decoding.
        implementation: Implementation of tree attention; None picks the best.
        mesh: The devices that share the models: a mesh with the axis "expert", "tensor" or both. None means
            one device. On a mesh, functions of arrays see shards; `on_mesh` makes programs of them.
    """

    target: ModelConfig
    proposer: Proposer | None = None
    _: KW_ONLY
    implementation: str | None = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, AbstractMesh | None):
            # Programs use both axes, and are equal for equal devices.
            object.__setattr__(self, "mesh", as_mesh(self.mesh))
        check_partition(self.target, self.mesh)
        check_proposer(self.proposer, self.mesh)

    @functools.cached_property
    def models(self) -> "Models":
        """This record without a subclass's settings, so that programs are shared by all settings."""
        return Models(self.target, self.proposer, implementation=self.implementation, mesh=self.mesh)

    @property
    def alone(self) -> "Models":
        """The target without its proposer."""
        return Models(self.target, implementation=self.implementation, mesh=self.mesh)

    def empty_state(
        self, slots: int, *, num_pages: int, pages_per_slot: int, page_size: int, dtype: jnp.dtype
    ) -> DecodeState:
        """A state with only free slots; on a mesh it is created in shards.

        Args:
            slots: B.
            num_pages: P, pages of the pool that all slots share.
            pages_per_slot: T; a slot holds at most ``T * page_size`` tokens.
            page_size: Tokens of a page.
            dtype: Type of the stores: the weights' dtype.
        """
        sizes = slots, num_pages, pages_per_slot, page_size, jnp.dtype(dtype)
        models = self.models
        return _empty_state(models, *sizes) if self.mesh is None else _split_empty_state(models, *sizes)()

    def state_specs(self, state: DecodeState) -> DecodeState:
        """The partition specs of a state: stores are sharded by heads, everything else is replicated."""
        mesh, proposer = self.mesh, self.proposer
        assert mesh is not None
        proposer_specs = (
            WHOLE if proposer is None else split_proposer(proposer).state_specs(state.proposer, mesh)
        )
        return replace(
            state,
            stores=tuple(store.specs(shards.ALL) for store in state.stores),
            proposer=proposer_specs,
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
        """A function that all devices run on their shards of weights and state; unchanged without a mesh.

        The function takes weights, a state and other arguments, which have the partition specs ``others``;
        None: all are replicated. Without specs, the results are a state and a replicated value.
        """
        mesh, proposer = self.mesh, self.proposer
        if mesh is None:
            return function

        def run(weights: DecodeWeights, state: DecodeState, *given: Any) -> Any:
            of_proposer = WHOLE if proposer is None else split_proposer(proposer).weight_specs(mesh)
            of_exchange: Any = PartitionSpec(shards.ALL)
            of_weights = DecodeWeights(parameter_specs(self.target, mesh), of_proposer, of_exchange)
            of_state = self.state_specs(state)
            of_others = [WHOLE] * len(given) if others is None else others
            returned = (of_state, WHOLE) if results is None else results
            specs = of_weights, of_state, *of_others
            return everywhere(mesh, local, specs, returned)(weights, state, *given)

        def local(weights: DecodeWeights, *others: Any) -> Any:
            with shards.through(weights.exchange):
                return function(weights, *others)

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
    """The program that creates an empty state on a mesh in shards."""
    make = functools.partial(_empty_state, models, *sizes)
    assert models.mesh is not None
    specs = models.state_specs(jax.eval_shape(make))
    return jax.jit(make, out_shardings=shardings(models.mesh, specs))
