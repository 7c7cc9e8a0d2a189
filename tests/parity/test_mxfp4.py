import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from convert.conversion import to_huggingface, to_orbax
from jetspec_jax import load_target, logits
from jetspec_jax.models.key_table import Key
from tests.loading.published import write
from tests.loading.test_gpt_oss import TINY, other_tensors, packed_experts
from tests.parity.oracle import assert_close, oracle_logits, random_ids

pytestmark = pytest.mark.parity


class TestExperts:
    @pytest.mark.parametrize("scales", [(100, 140), (0, 161)], ids=["usual", "all"])
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


def test_a_converted_checkpoint_is_read_by_transformers(tmp_path):
    """Widened by us, it is a plain model there: nothing of it says that it was packed."""
    raw = {**TINY, "pad_token_id": 0}  # within the vocabulary
    # Of matrices as large as they are, logits are so large that their rounding is above the tolerance.
    factors = {1: np.float32(1), 2: np.float32(0.2)}
    others = {name: tensor * factors[tensor.ndim] for name, tensor in other_tensors().items()}
    packed = write(tmp_path / "packed", raw, others | packed_experts())
    to_orbax(packed, tmp_path / "orbax", dtype="float32")
    to_huggingface(tmp_path / "orbax", tmp_path / "back")
    model, loading = transformers.GptOssForCausalLM.from_pretrained(
        tmp_path / "back", dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values())
    ids = random_ids(0, 2, 20)
    assert_close(logits(load_target(packed, dtype="float32"), ids), oracle_logits(model, ids))
