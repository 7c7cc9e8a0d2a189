"""The frozen target in a training step: replicated, or sharded over groups of devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jetspec_jax.config import ModelConfig
from jetspec_jax.device.mesh import everywhere, size_of
from jetspec_jax.device.partition import parameter_specs
from jetspec_jax.models import Weights, bind
from pallas_kernels import shards
from train.loss.precision import whole


class Teacher:
    """A frozen target, replicated or sharded over the mesh of `jax.set_mesh`.

    The axes "expert" and "tensor" shard the target as in decoding; the other axes split the batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights):
        """The weights must lie on the mesh."""
        self.config, self.mesh = config, jax.sharding.get_abstract_mesh()
        self.split = size_of(self.mesh) > 1
        self.weights = weights if self.split else whole(weights)

    def __call__(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """Applies a function to the target's module and to arrays.

        A sharded target is not differentiable.

        Args:
            function: Takes the module and the arrays. With a sharded target it gets the device's shard, and
                must return equal results on all devices of a group.
            arrays: Arrays with a leading axis of sequences, as in the results.
        """

        def run(weights: Weights, *arrays: Array) -> Any:
            return function(bind(self.config, weights), *arrays)

        if not self.split:
            return run(self.weights, *arrays)
        # Manual over the batch axes too, because the kernels and cuDNN's attention need it: if XLA split the
        # batch, they would fall back to XLA.
        batch = PartitionSpec(tuple(axis for axis in self.mesh.axis_names if axis not in shards.ALL))
        specs = parameter_specs(self.config, self.mesh), *(batch for _ in arrays)
        return everywhere(self.mesh, run, specs, batch)(self.weights, *arrays)

    def embed(self, tokens: Int[Array, "B N"], *, scaled: bool = True) -> Float[Array, "B N M"]:
        """As `Transformer.embed`."""
        return self(lambda target, tokens: target.embed(tokens, scaled=scaled), tokens)

    def read(self, function: Callable[..., Any], *arrays: Array, capped: bool) -> Any:
        """Applies a function to the output projection, or its vocabulary shard, and to arrays.

        Args:
            function: Takes two functions from hidden states to logits, the target's and the head's, and the
                arrays.
            arrays: As in a call.
            capped: Whether the head's logits are soft-capped as the target's are.
        """

        def run(target: Any, *arrays: Array) -> Any:
            return function(target.logits, partial(target.logits, capped=capped), *arrays)

        return self(run, *arrays)
