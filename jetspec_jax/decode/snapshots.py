"""Snapshots: copies of the slots' rings and recurrent states, for requests that share pages.

Pages are shared by their numbers. A request that starts after shared pages also needs the rings and recurrent
states at their end. They are kept in stores with K entries, like the stores of K slots.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, ArrayLike, Int

from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import Store, empty_stores
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.state import DecodeState
from jetspec_jax.device.mesh import WHOLE, everywhere, shardings
from jetspec_jax.device.partition import spread
from pallas_kernels import shards

#: For each layer with one store entry per slot, a store with one entry per snapshot.
Snapshots = tuple[Store, ...]


def empty_snapshots(
    models: Models,
    count: int,
    *,
    pages_per_slot: int,
    page_size: int,
    dtype: jnp.dtype,
) -> Snapshots:
    """``count`` empty snapshots for slots of such sizes; on a mesh they are created in shards."""
    return _program(models, count, pages_per_slot, page_size, jnp.dtype(dtype))()


@functools.cache
def _program(models: Models, count: int, pages_per_slot: int, page_size: int, dtype: jnp.dtype) -> Any:
    def make() -> Snapshots:
        whole = spread(models.target, models.mesh)
        snapshot_config = replace(whole, layers=tuple(whole.layers[i] for i in whole.layers_with_places))
        free = Slots.of(jnp.zeros((count, pages_per_slot), jnp.int32), jnp.zeros(count, jnp.int32))
        return empty_stores(snapshot_config, 0, page_size, dtype, free)

    if models.mesh is None:
        return make
    return jax.jit(make, out_shardings=shardings(models.mesh, snapshot_specs(jax.eval_shape(make))))


def snapshot_specs(stores: Any) -> Any:
    """The partition specs of snapshots, which are sharded by heads like the state's stores."""
    return tuple(store.specs(shards.ALL) for store in stores)


def keep(
    models: Models,
    state: DecodeState,
    snapshots: Snapshots,
    slot: Int[ArrayLike, ""],
    place: Int[ArrayLike, ""],
) -> Snapshots:
    """Copies a slot's rings and states to snapshot ``place``. ``snapshots`` is donated, the state is not."""
    slot_stores = tuple(state.stores[i] for i in models.target.layers_with_places)
    return _with_slot(models.mesh, snapshots, place, slot_stores, slot)


def restore(
    models: Models,
    state: DecodeState,
    snapshots: Snapshots,
    slot: Int[ArrayLike, ""],
    place: Int[ArrayLike, ""],
) -> DecodeState:
    """The inverse of `keep`: copies a snapshot to a slot. The state is donated."""
    layers, stores = models.target.layers_with_places, list(state.stores)
    restored = _with_slot(models.mesh, tuple(stores[i] for i in layers), slot, snapshots, place)
    for layer, store in zip(layers, restored, strict=True):
        stores[layer] = store
    return replace(state, stores=tuple(stores))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _with_slot(
    mesh: Mesh | None,
    stores: Snapshots,
    number: Int[Array, ""],
    others: Snapshots,
    others_number: Int[Array, ""],
) -> Snapshots:
    def copy(
        stores: Snapshots, number: Int[Array, ""], others: Snapshots, others_number: Int[Array, ""]
    ) -> Snapshots:
        pairs = zip(stores, others, strict=True)
        return tuple(store.with_slot(number, other, others_number) for store, other in pairs)

    if mesh is None:
        return copy(stores, number, others, others_number)
    specs = snapshot_specs(stores)
    each = specs, WHOLE, snapshot_specs(others), WHOLE
    return everywhere(mesh, copy, each, specs)(stores, number, others, others_number)
