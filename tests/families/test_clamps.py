"""The goldens reach every clamp of their families' activations: without one the logits are others."""

from dataclasses import replace

import numpy as np
import pytest

from jetspec_jax import logits
from pallas_kernels.activation import Activation
from tests.families.goldens import IDS, golden_logits, golden_target
from tests.marks import wide


def without_limits(layer, experts):
    """A layer whose routed experts, or whose dense or shared block, have no limit any more."""
    own = layer.experts.activation if experts else layer.activation
    assert own.limit is not None
    free = Activation(slope=own.slope, shift=own.shift)
    return (
        replace(layer, experts=replace(layer.experts, activation=free))
        if experts
        else replace(layer, activation=free)
    )


@pytest.mark.parametrize(
    ("family", "layer", "experts"),
    [
        ("gpt_oss", 0, True),
        wide("step3p7", 3, False),
        ("step3p7", 3, True),
    ],
)
def test_a_clamp_matters(family, layer, experts):
    target = golden_target(family)
    layers = list(target.config.layers)
    layers[layer] = without_limits(layers[layer], experts)
    changed = replace(target, config=replace(target.config, layers=tuple(layers)))
    assert np.abs(np.asarray(logits(changed, IDS)) - golden_logits(family)).max() > 0.01
