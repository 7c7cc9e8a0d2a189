import ml_dtypes
import numpy as np
import pytest

from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from jetspec_jax.models import FAMILIES
from jetspec_jax.models.mxfp4 import widen
from tests.loading.families import EXPERTS, Packed, random_experts
from tests.loading.published import V4, write

RAW = {**V4, "num_hidden_layers": 1, "max_window_layers": 1, "hidden_size": 64, "intermediate_size": 96}
CONFIG = parse_model_config(RAW)
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"


def value_of(byte, high, scale):
    """One value by the definition of e2m1 and e8m0, in Python's own numbers."""
    bits = byte >> 4 if high else byte & 15
    sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
    magnitude = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return (-1) ** sign * magnitude * 2.0 ** (scale - 127)


def random_packed(*rows, seed=0):
    """Blocks and scales of rows ``[..., G]``, of all kinds."""
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(*rows, 16), dtype=np.uint8), rng.integers(
        100, 140, size=rows, dtype=np.uint8
    )


@pytest.fixture
def tensors(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen3", Packed)
    packed = dict(random_experts(RAW)[3])
    for seed, (name, rows) in enumerate(((GATE_UP, (EXPERTS, 192, 2)), (DOWN, (EXPERTS, 64, 3)))):
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = random_packed(*rows, seed=seed)
    return packed


def refused(folder, tensors, match="does not hold the tensors of its config"):
    with pytest.raises(ValueError, match=match) as info:
        read_weights(write(folder, RAW, tensors), CONFIG)
    return str(info.value).splitlines()[1:]


class TestWiden:
    def test_every_byte_with_every_scale(self):
        blocks = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (161, 1, 1))
        scales = np.repeat(np.arange(161, dtype=np.uint8), 16).reshape(161, 16)
        widened = widen(blocks, scales)
        assert widened.shape == (161, 512)
        expected = [[value_of(n // 2, n % 2, scale) for n in range(512)] for scale in range(161)]
        np.testing.assert_array_equal(widened, np.array(expected))
        np.testing.assert_array_equal(np.signbit(widened), np.signbit(expected))  # of zeros, too
        halves = widen(blocks, scales, np.dtype(ml_dtypes.bfloat16))
        assert halves.dtype == ml_dtypes.bfloat16
        assert halves.astype(np.float32).tobytes() == widened.tobytes()

    @pytest.mark.parametrize("rows", [(1,), (5, 3), (2, 3, 4)])
    def test_shapes(self, rows):
        blocks, scales = random_packed(*rows)
        widened = widen(blocks, scales)
        assert widened.shape == (*rows[:-1], 32 * rows[-1])
        for *row, column in np.ndindex(*widened.shape):
            block, within = divmod(column, 32)
            byte, scale = blocks[*row, block, within // 2], scales[*row, block]
            assert widened[*row, column] == value_of(int(byte), within % 2, int(scale))

    @pytest.mark.parametrize("scale", [161, 255])
    def test_a_scale_that_is_too_large(self, scale):
        blocks, scales = random_packed(2, 3)
        scales[1, 2] = scale
        with pytest.raises(ValueError, match=f"a scale is the byte {scale}"):
            widen(blocks, scales)


class TestCheckpoint:
    @pytest.mark.parametrize("dtype", [None, np.dtype(np.float32)], ids=["stored", "float32"])
    def test_is_read(self, tmp_path, tensors, dtype):
        """Output first; gate and up in turns. What is stored in 4 bits is bfloat16 in memory."""
        weights = read_weights(write(tmp_path / "it", RAW, tensors), CONFIG, dtype)
        held = weights["layers"][0]["mlp"]["experts"]
        assert held["gate_up_proj"].dtype == held["down_proj"].dtype == (dtype or ml_dtypes.bfloat16)
        gate_up = widen(tensors[f"{GATE_UP}_blocks"], tensors[f"{GATE_UP}_scales"])
        down = widen(tensors[f"{DOWN}_blocks"], tensors[f"{DOWN}_scales"])
        gate_up_held = np.asarray(held["gate_up_proj"], np.float32)
        np.testing.assert_array_equal(gate_up_held[:, :, 0], gate_up[:, 0::2].swapaxes(1, 2))
        np.testing.assert_array_equal(gate_up_held[:, :, 1], gate_up[:, 1::2].swapaxes(1, 2))
        np.testing.assert_array_equal(np.asarray(held["down_proj"], np.float32), down.swapaxes(1, 2))

    def test_is_written_widened(self, tmp_path, tensors):
        weights = read_weights(write(tmp_path / "it", RAW, tensors), CONFIG)
        save_checkpoint(tmp_path / "ours", RAW, weights, dtype=None)
        again = read_weights(tmp_path / "ours", CONFIG)["layers"][0]["mlp"]["experts"]
        held = weights["layers"][0]["mlp"]["experts"]
        for name in ("gate_up_proj", "down_proj"):
            assert np.asarray(again[name]).tobytes() == np.asarray(held[name]).tobytes()

    def test_shapes_that_do_not_match(self, tmp_path, tensors):
        tensors[f"{GATE_UP}_scales"] = tensors[f"{GATE_UP}_scales"][:, :, :1].copy()
        assert refused(tmp_path / "it", tensors) == [
            f"  misshapen: {GATE_UP}_blocks is [3, 192, 2, 16] and {GATE_UP}_scales is [3, 192, 1], "
            "expected [3, 192, 2, 16] and [3, 192, 2]"
        ]

    def test_other_types(self, tmp_path, tensors):
        """Bytes are read as bytes only where they are MXFP4."""
        tensors[f"{DOWN}_blocks"] = tensors[f"{DOWN}_blocks"].view(np.int8)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.uint8)
        assert refused(tmp_path / "it", tensors) == [
            f"  unsupported type: {DOWN}_blocks is I8, not one of ('U8',)",
            "  unsupported type: lm_head.weight is U8, not one of ('F32', 'BF16', 'F16')",
        ]

    def test_blocks_without_scales(self, tmp_path, tensors):
        del tensors[f"{DOWN}_scales"]
        assert refused(tmp_path / "it", tensors) == [f"  missing: {DOWN}_scales"]

    def test_both_forms(self, tmp_path, tensors):
        tensors[DOWN] = np.zeros((EXPERTS, 96, 64), np.float32)
        assert refused(tmp_path / "it", tensors) == [
            f"  stored twice: layers.0.mlp.experts.down_proj, as {DOWN} and as {DOWN}_blocks"
        ]

    def test_rows_that_are_no_whole_blocks(self, tmp_path, tensors):
        raw = {**RAW, "intermediate_size": 48}
        with pytest.raises(ValueError, match=f"{DOWN}_blocks: rows of 48 values are no whole blocks of 32"):
            read_weights(write(tmp_path / "it", raw, tensors), parse_model_config(raw))

    def test_a_scale_that_is_too_large(self, tmp_path, tensors):
        tensors[f"{DOWN}_scales"][1, 2, 0] = 161
        refused(tmp_path / "it", tensors, match=f"it: {DOWN}_blocks, {DOWN}_scales: a scale is the byte 161")
