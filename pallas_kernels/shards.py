"""Devices that compute one program together, each its part: who they are, and what they tell each other.

Inside of a `jax.shard_map` over the axes `ALL` of a mesh each device runs the program on its own parts of
the arrays. A program that no mesh encloses, or one of a single device, is whole: it has one part, and nothing
is lowered for these calls.

Whatever steers control (a choice, a count, a condition) must be equal on all devices, bit for bit. A sum of
floats over devices promises no such thing, so it is made of what `gather` gives, in the order of the parts.

All devices must come to all sums and gathers in one order. XLA sees to that in a sequence of operations, but on
CPUs not where some of them are inside of a condition or a loop: those must each be made of what the one before
has given.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Num, Shaped

#: Routed experts are split over it by number.
EXPERT = "expert"
#: Routed experts are split over it by features.
TENSOR = "tensor"
#: All else is split over both together.
ALL = (EXPERT, TENSOR)


def count(*axes: str) -> int:
    """Parts along some axes, by default all; 1 in a whole program."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes or ALL if axis in mesh.manual_axes)


def index(*axes: str) -> Int[Array, ""] | int:
    """Which part along some axes, by default all, this device computes."""
    return jax.lax.axis_index(axes or ALL) if count(*axes) > 1 else 0


def all_sum(x: Num[Array, "*shape"]) -> Num[Array, "*shape"]:
    """The sum over all parts, of which only the order of rounding may differ between devices."""
    return jax.lax.psum(x, ALL) if count() > 1 else x


def gather(x: Shaped[Array, "*shape"]) -> Shaped[Array, "parts *shape"]:
    """What all parts hold, in their order; the same bits on every device."""
    return jax.lax.all_gather(x, ALL) if count() > 1 else jnp.expand_dims(x, 0)
