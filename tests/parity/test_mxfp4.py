import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jetspec_jax.models.key_table import Key

pytestmark = pytest.mark.parity


class TestExperts:
    @pytest.mark.parametrize("scales", [(100, 140), (0, 253)], ids=["usual", "all"])
    def test_as_transformers_holds_them(self, scales):
        """Blocks ``[E, out, G, 16]`` become ``[E, in, out]`` there; here gate and up are apart besides."""
        rng = np.random.default_rng(0)
        blocks = rng.integers(256, size=(3, 80, 3, 16), dtype=np.uint8)
        powers = rng.integers(*scales, size=(3, 80, 3), dtype=np.uint8)
        theirs = convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(powers), dtype=torch.float32
        )
        assert theirs.shape == (3, 96, 80)
        key = Key("blocks", "gate_up_proj", "e m two i -> e (i two) m", scales="scales")
        ours = np.empty((3, 96, 2, 40), np.float32)
        key.from_file(ours, blocks, powers)
        np.testing.assert_array_equal(ours[:, :, 0], theirs[:, :, 0::2].numpy())
        np.testing.assert_array_equal(ours[:, :, 1], theirs[:, :, 1::2].numpy())
        key = Key("blocks", "down_proj", "e i m -> e m i", scales="scales")
        ours = np.empty((3, 96, 80), np.float32)
        key.from_file(ours, blocks, powers)
        np.testing.assert_array_equal(ours, theirs.numpy())
