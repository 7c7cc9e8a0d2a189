"""Sums and gathers between devices that compute shards of one program.

Inside of a `jax.shard_map` over the axes `ALL` of a mesh, each device runs the program on its shards of the
arrays. Outside of a mesh, or on one device, there is one shard, and these calls lower to nothing.

Values that steer control (choices, counts, conditions) must have the same bits on all devices. A sum of
floats over devices does not guarantee this, so such values are computed from `gather`, in the order of the
shards.

All devices must run all sums and gathers in the same order. XLA guarantees it for a sequence of operations,
but on CPUs not for operations inside of conditions and loops: each of those must depend on the result of the
one before.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num, Shaped

from pallas_kernels import peer_sum

#: The axis that shards routed experts by number.
EXPERT = "expert"
#: The axis that shards routed experts by features.
TENSOR = "tensor"
#: The axes that together shard everything else.
ALL = (EXPERT, TENSOR)
_EXCHANGE: contextvars.ContextVar[peer_sum.Exchange | None] = contextvars.ContextVar("exchange", default=None)


@contextlib.contextmanager
def through(exchange: peer_sum.Exchange | None) -> Iterator[None]:
    """Sums inside of the context go through an exchange if they can; see `peer_sum`."""
    token = _EXCHANGE.set(exchange)
    try:
        yield
    finally:
        _EXCHANGE.reset(token)


def count(*axes: str) -> int:
    """The number of shards along some axes, by default all; 1 outside of a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes or ALL if axis in mesh.manual_axes)


def index(*axes: str) -> Int[Array, ""] | int:
    """The index of this device's shard along some axes, by default all."""
    return jax.lax.axis_index(axes or ALL) if count(*axes) > 1 else 0


def all_sum(x: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """The sum over all shards; devices may round it in different orders."""
    if count() == 1:
        return x
    exchange = _EXCHANGE.get()
    if exchange is not None and peer_sum.unsupported(x, exchange) is None:
        return peer_sum.peer_sum(x, exchange, ALL)
    return jax.lax.psum(x, ALL)


def gather(x: Shaped[Array, "*shape"]) -> Shaped[Array, "parts *shape"]:
    """The values of all shards in order; every device gets the same bits."""
    return jax.lax.all_gather(x, ALL) if count() > 1 else jnp.expand_dims(x, 0)
