"""The frozen target in a training step: whole on every device, or in parts that devices compute together."""

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
    """A frozen target, of which each device of a group has a part where the step's mesh has such groups.

    The mesh is that of `jax.set_mesh`. Its axes "expert" and "tensor" split the target as for decoding, and
    its others the batch.
    """

    def __init__(self, config: ModelConfig, weights: Weights):
        """Takes the weights as they lie on the mesh."""
        self.config, self.mesh = config, jax.sharding.get_abstract_mesh()
        self.split = size_of(self.mesh) > 1
        self.weights = weights if self.split else whole(weights)

    def __call__(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """What a function makes of the target's module and of arrays.

        The function has no derivative where the target is in parts.

        Args:
            function: Takes the module and the arrays. On a mesh it gets a device's own part of the target,
                and all results must be equal on the devices of a group.
            arrays: Sequences first, as are the results.
        """

        def run(weights: Weights, *arrays: Array) -> Any:
            return function(bind(self.config, weights), *arrays)

        if not self.split:
            return run(self.weights, *arrays)
        # Manual over the axes of the batch too: kernels and cuDNN's attention need it, and would give way to
        # XLA if that were to split the batch.
        batch = PartitionSpec(tuple(axis for axis in self.mesh.axis_names if axis not in shards.ALL))
        specs = parameter_specs(self.config, self.mesh), *(batch for _ in arrays)
        return everywhere(self.mesh, run, specs, batch)(self.weights, *arrays)

    def embed(self, tokens: Int[Array, "B N"], *, scaled: bool = True) -> Float[Array, "B N M"]:
        """As `Transformer.embed`."""
        return self(lambda target, tokens: target.embed(tokens, scaled=scaled), tokens)

    def read(self, function: Callable[..., Any], *arrays: Array, capped: bool) -> Any:
        """What a function makes of the output table and of arrays; on a mesh, of a part of the vocabulary.

        Args:
            function: Takes the target's logits as a function of hidden states, the head's likewise, and the
                arrays.
            arrays: As for a call.
            capped: Whether the head's logits are capped as the target's are.
        """

        def run(target: Any, *arrays: Array) -> Any:
            return function(target.logits, partial(target.logits, capped=capped), *arrays)

        return self(run, *arrays)
