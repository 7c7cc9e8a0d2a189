"""FP8 checkpoints: what is read, that it stays FP8, and that it is what NumPy makes of the files."""

import copy
import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jetspec_jax import LLM, AsyncLLM, CheckpointError, load_draft_head, load_target
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.tensor_plan import expected_parameters
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from jetspec_jax.device.memory import weight_bytes
from jetspec_jax.device.partition import check_partition, is_split
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.models import quantized_blocks
from jetspec_jax.models.quantized import contracted_last
from pallas_kernels.quantized import FP8, Quantized
from tests.families.goldens import FOLDER, MADE_OF_OTHERS, NAMES
from tests.kernels.test_quantized_rows import at_no_boundary
from tests.kernels.test_quantized_rows import quantised as quantised_rows
from tests.loading import test_qwen3_moe as moe
from tests.loading.fp8 import blocks, channels, load, quantised, scale_name, widened
from tests.loading.published import HEAD, V4, head_shapes, random_tensors, target_shapes, write
from tests.meshes import mesh_of

# Heads of 12 and features of 72 in blocks of 16 x 32: partial ones, and some that go over heads.
LARGER = {**V4, "hidden_size": 40, "head_dim": 12, "intermediate_size": 72, "num_hidden_layers": 1}
KINDS = {
    "smaller than a block": (V4, blocks(128, 128)),
    "partial blocks": (LARGER, blocks(16, 32)),
    "channels": (LARGER, channels()),
}


def make(raw, config, scale_dtype=np.float32):
    """A model's config and tensors in FP8."""
    tensors = {name: 0.3 * own for name, own in random_tensors(target_shapes(raw)).items()}
    return {**raw, "quantization_config": config}, quantised(tensors, config, scale_dtype)


def read(folder, raw, tensors, dtype="float32"):
    return read_weights(write(folder, raw, tensors), parse_model_config(raw), jnp.dtype(dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_file_has_in_fp8_stays_fp8(tmp_path, kind, dtype):
    raw, tensors = make(*KINDS[kind], ml_dtypes.bfloat16)
    weights, config = read(tmp_path / "fp8", raw, tensors, dtype), parse_model_config(raw)
    layer = weights["layers"][0]
    for parameter in (layer["self_attn"]["qkv_proj"], layer["mlp"]["down_proj"]):
        assert parameter["values"].dtype == FP8
        assert parameter["scales"].dtype == jnp.float32
    assert layer["input_layernorm"]["weight"].dtype == weights["lm_head"].dtype == dtype
    found = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert found == weight_bytes(config, jnp.dtype(dtype))
    wide = widened(tensors, raw["quantization_config"])
    down = layer["mlp"]["down_proj"]
    block = quantized_blocks(config)["layers", 0, "mlp", "down_proj"]
    scales = np.asarray(down["scales"])
    for axis, (size, own) in enumerate(zip(down["values"].shape, block, strict=True)):
        scales = np.repeat(scales, own, axis=axis).take(range(size), axis=axis)
    expected = wide["model.layers.0.mlp.down_proj.weight"].T
    np.testing.assert_array_equal(np.asarray(down["values"]).astype(np.float32) * scales, expected)


@pytest.mark.parametrize("kind", ["partial blocks", "channels"])
def test_logits_are_those_of_the_widened_checkpoint(tmp_path, kind):
    raw, tensors = make(*KINDS[kind])
    plain = {key: value for key, value in raw.items() if key != "quantization_config"}
    ours = load_target(write(tmp_path / "fp8", raw, tensors), dtype="float32")
    wide = widened(tensors, raw["quantization_config"])
    theirs = load_target(write(tmp_path / "wide", plain, wide), dtype="float32")
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    got, expected = (np.asarray(next_token_logits(own, tokens), np.float64) for own in (ours, theirs))
    # The same float32 weights, in products that may be summed in another order.
    assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
def test_written_again_it_is_the_same_file(tmp_path, kind):
    raw, tensors = make(*KINDS[kind], ml_dtypes.bfloat16)
    weights = read(tmp_path / "fp8", raw, tensors)
    save_checkpoint(tmp_path / "again", raw, jax.tree.map(np.asarray, weights), dtype="float32")
    again = load(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        own = tensor if tensor.dtype == FP8 else tensor.astype(np.float32)
        assert again[name].tobytes() == own.tobytes(), name


class TestRefused:
    def complaint(self, folder, raw, tensors):
        with pytest.raises(CheckpointError) as error:
            read(folder, raw, tensors)
        return str(error.value)

    def test_tensors(self, tmp_path):
        raw, tensors = make(*KINDS["partial blocks"])
        name = "model.layers.0.mlp.up_proj.weight"
        scale = f"{name}_scale_inv"
        found = self.complaint(
            tmp_path / "none", raw, {key: own for key, own in tensors.items() if key != scale}
        )
        assert f"missing: {scale}" in found
        bad = tensors[scale].copy()
        bad[1, 1] = np.inf
        found = self.complaint(tmp_path / "inf", raw, {**tensors, scale: bad})
        assert f"{scale} holds values that are not finite" in found
        nan = tensors[name].copy()
        nan.view(np.uint8)[3, 5] = 0x7F
        found = self.complaint(tmp_path / "nan", raw, {**tensors, name: nan})
        assert f"{name} holds values that are not finite" in found
        plain = {**tensors, name: tensors[name].astype(np.float32)}
        del plain[scale]
        found = self.complaint(tmp_path / "plain", raw, plain)
        assert f"{name} is F32, not one of ('F8_E4M3',); quantization_config does not leave it out" in found

    def test_a_matrix_that_the_config_leaves_out(self, tmp_path):
        raw, tensors = make(V4, blocks(128, 128, modules_to_not_convert=["model.layers.1.mlp"]))
        found = self.complaint(tmp_path / "left", raw, tensors)
        name = "model.layers.1.mlp.down_proj.weight"
        assert f"surplus: {name}_scale_inv" in found
        assert f"{name} is F8_E4M3" in found
        assert "config.json leaves it out of quantization_config" in found

    def test_an_fp8_file_whose_config_says_nothing(self, tmp_path):
        _, tensors = make(V4, blocks(128, 128))
        assert "; config.json has no quantization_config" in self.complaint(tmp_path / "x", V4, tensors)

    def test_scales_of_a_cache(self, tmp_path):
        raw, tensors = make(V4, channels())
        name = "model.layers.2.self_attn.k_proj.k_scale"
        found = self.complaint(tmp_path / "x", raw, {**tensors, name: np.ones(1, np.float32)})
        assert f"{name} is a scale of a KV cache, which is not quantised here" in found
        assert "surplus" not in found

    def test_another_fp8(self, tmp_path):
        raw, tensors = make(V4, blocks(128, 128))
        name = "model.layers.0.mlp.up_proj.weight"
        other = {**tensors, name: tensors[name].view(np.uint8).view(ml_dtypes.float8_e5m2)}
        assert f"{name} is F8_E5M2, not one of ('F8_E4M3',)" in self.complaint(tmp_path / "x", raw, other)


class TestScales:
    """A scale is refused by its tensor's name if it is not positive, or its weights may not be finite."""

    NAME = "model.layers.0.self_attn.k_proj.weight"  # one of three matrices of a parameter

    def stored(self, kind, value, scale_dtype=np.float32, name=NAME):
        """A checkpoint whose last scale of a matrix is ``value``; also the scale's name."""
        raw, tensors = make(*KINDS[kind], scale_dtype)
        scale = scale_name(name, raw["quantization_config"])
        tensors[scale].flat[-1] = value
        return raw, tensors, scale

    @pytest.mark.parametrize("kind", ["partial blocks", "channels"])
    @pytest.mark.parametrize("value", [0.0, -0.0, -2.5, 2.0**120])
    @pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
    def test_is_refused_by_name(self, tmp_path, kind, value, scale_dtype):
        raw, tensors, scale = self.stored(kind, value, scale_dtype)
        why = "times 448, the largest value of FP8, it is not finite in float32"
        says = re.escape(
            f"a scale is {value:g}; {'scales of FP8 weights must be positive' if value <= 0 else why}"
        )
        with pytest.raises(CheckpointError, match=rf"{scale}: {says} \(model\.safetensors\)$"):
            read(tmp_path / "x", raw, tensors)

    @pytest.mark.parametrize(
        ("dtype", "largest", "least"),
        [("float32", 7.59e35, 7.6e35), ("bfloat16", 7.56e35, 7.59e35), ("float16", 146.2, 146.5)],
    )
    def test_the_limit_is_that_of_the_products(self, tmp_path, dtype, largest, least):
        raw, tensors, scale = self.stored("partial blocks", largest)
        weights = read(tmp_path / "good", raw, tensors, dtype)
        parameter = weights["layers"][0]["self_attn"]["qkv_proj"]
        assert float(parameter["scales"].max()) == np.float32(largest)
        block = quantized_blocks(parse_model_config(raw))["layers", 0, "self_attn", "qkv_proj"]
        wide = Quantized(parameter["values"], parameter["scales"], block).widened(jnp.dtype(dtype))
        assert np.isfinite(np.asarray(wide, np.float32)).all()
        raw, tensors, scale = self.stored("partial blocks", least)
        with pytest.raises(CheckpointError, match=f"{scale}: .* it is not finite in {dtype} "):
            read(tmp_path / "bad", raw, tensors, dtype)

    def test_what_is_not_finite_is_said_as_of_values(self, tmp_path):
        raw, tensors, scale = self.stored("channels", np.nan)
        with pytest.raises(CheckpointError, match=f"{scale} holds values that are not finite"):
            read(tmp_path / "x", raw, tensors)

    def test_garbage_that_is_allowed(self, tmp_path):
        for name, value in (("nan", np.nan), ("inf", np.inf), ("large", 1e38)):
            raw, tensors, _ = self.stored("channels", value)
            folder = write(tmp_path / name, raw, tensors)
            read_weights(folder, parse_model_config(raw), jnp.dtype("float32"), allow_nonfinite=True)
        raw, tensors, scale = self.stored("channels", -1.0)
        tensors[scale].flat[0] = np.nan
        folder = write(tmp_path / "negative", raw, tensors)
        with pytest.raises(CheckpointError, match=f"{scale}: a scale is -1"):
            read_weights(folder, parse_model_config(raw), allow_nonfinite=True)

    def test_a_device_reads_its_own_alone_and_names_them(self, tmp_path):
        raw, tensors = make({**LARGER, "intermediate_size": 64}, blocks(16, 16))
        scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
        tensors[scale].flat[-1] = 0
        folder = write(tmp_path / "x", raw, tensors)
        with pytest.raises(CheckpointError, match=f"{scale}: a scale is 0"):
            read_weights(folder, parse_model_config(raw), jnp.dtype("float32"), mesh_of(1, 2))

    @pytest.mark.parametrize("form", [moe.one_by_one, moe.fused])
    def test_of_experts(self, tmp_path, form):
        experts = moe.random_experts({**moe.MIXED, "intermediate_size": moe.MIXED["moe_intermediate_size"]})
        config = blocks(4, 8)
        tensors = quantised(moe.published(form, experts), config)
        name = max(name for name in tensors if "layers.2.mlp.experts" in name and "scale" in name)
        tensors[name].flat[-1] = 0
        raw = {**moe.MIXED, "quantization_config": config}
        with pytest.raises(CheckpointError, match=f"{re.escape(name)}: a scale is 0"):
            read(tmp_path / "x", raw, tensors)

    def test_of_a_draft_head(self, tmp_path):
        config = channels()
        tensors = quantised(random_tensors(head_shapes(HEAD)), config)
        tensors["fc.weight_scale"][3] = 1e38
        folder = write(tmp_path / "head", {**HEAD, "quantization_config": config}, tensors)
        with pytest.raises(CheckpointError, match=r"fc\.weight_scale: a scale is 1e"):
            load_draft_head(folder, dtype="bfloat16")


class TestActivations:
    """``fp8_activations``, against a forward in float64 that quantises activations by NumPy."""

    def expected(self, raw, tensors, tokens):
        """The logits of the last token of a Qwen3."""
        config, wide = raw["quantization_config"], widened(tensors, raw["quantization_config"])
        group = config["weight_block_size"][1] if config["quant_method"] == "fp8" else 0
        heads, kv, size = (raw[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))

        def norm(x, name):
            scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + raw["rms_norm_eps"])
            return scaled * wide[f"{name}.weight"]

        def linear(x, name):
            assert at_no_boundary(x, group)  # where another rounding in float32 would be another value
            return quantised_rows(x, group)[2] @ wide[f"{name}.weight"].astype(np.float64).T

        def rotary(x):
            angles = np.arange(len(x))[:, None] / raw["rope_theta"] ** (np.arange(0, size, 2) / size)
            cos, sin = (own(np.concatenate([angles, angles], 1))[:, None] for own in (np.cos, np.sin))
            return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

        x = wide["model.embed_tokens.weight"][tokens].astype(np.float64)
        for i in range(raw["num_hidden_layers"]):
            at = f"model.layers.{i}"
            h = norm(x, f"{at}.input_layernorm")
            q, k, v = (linear(h, f"{at}.self_attn.{n}_proj").reshape(len(x), -1, size) for n in "qkv")
            q, k = (rotary(norm(own, f"{at}.self_attn.{n}_norm")) for own, n in ((q, "q"), (k, "k")))
            k, v = (np.repeat(own, heads // kv, axis=1) for own in (k, v))
            scores = np.einsum("qhe,khe->hqk", q, k) / np.sqrt(size)
            scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("hqk,khe->qhe", shares / shares.sum(-1, keepdims=True), v)
            x = x + linear(out.reshape(len(x), -1), f"{at}.self_attn.o_proj")
            h = norm(x, f"{at}.post_attention_layernorm")
            gate, up = (linear(h, f"{at}.mlp.{n}_proj") for n in ("gate", "up"))
            x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
        return norm(x, "model.norm")[-1] @ wide["lm_head.weight"].T

    @pytest.mark.parametrize("kind", KINDS)
    def test_logits(self, tmp_path, kind):
        raw, tensors = make(*KINDS[kind])
        folder, tokens = write(tmp_path / "fp8", raw, tensors), [16, 12, 9, 5]
        expected = self.expected(raw, tensors, tokens)
        size = np.abs(expected).max()

        def apart(**settings):
            target = load_target(folder, dtype="float32", **settings)
            return np.abs(np.asarray(next_token_logits(target, tokens), np.float64) - expected).max() / size

        assert apart(fp8_activations=True) <= 1e-5
        assert apart() == apart(fp8_activations=False) > 1e-3

    @pytest.mark.parametrize("kind", KINDS)
    def test_they_are_the_default_in_sixteen_bits(self, tmp_path, kind, monkeypatch):
        folder = write(tmp_path / "x", *make(*KINDS[kind]))

        def quantised(dtype):
            return load_target(folder, dtype=dtype).config.quantization.fp8_activations

        assert [quantised(dtype) for dtype in ("bfloat16", "float16", "float32")] == [True, True, False]
        monkeypatch.setattr("jetspec_jax.checkpoint.source.fp8_problem", lambda: "no FP8")
        assert not quantised("bfloat16")

    def test_a_config_that_leaves_them_out(self, tmp_path):
        raw, tensors = make(*copy.deepcopy(KINDS["channels"]))
        raw["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        target = load_target(write(tmp_path / "x", raw, tensors), dtype="float32", fp8_activations=True)
        assert not target.config.quantization.fp8_activations

    def test_activations_of_another_scheme_are_refused_by_name(self, tmp_path):
        raw, tensors = make(*copy.deepcopy(KINDS["channels"]))
        inputs = raw["quantization_config"]["config_groups"]["group_0"]["input_activations"]
        inputs.update(strategy="group", group_size=16)
        folder = write(tmp_path / "x", raw, tensors)
        assert load_target(folder, dtype="bfloat16").config.quantization.row_group is None
        with pytest.raises(
            ValueError, match="input_activations of strategy 'group', float of 8 bits, groups of 16"
        ):
            load_target(folder, fp8_activations=True)

    def test_static_scales_are_said_once(self, tmp_path, caplog):
        raw, tensors = make(V4, blocks(128, 128, activation_scheme="static"))
        folder = write(tmp_path / "x", raw, tensors)
        load_target(folder, fp8_activations=False)
        assert "dynamic scales" not in caplog.text
        for _ in range(2):
            assert load_target(folder, fp8_activations=True).config.quantization.row_group == 128
        assert (
            caplog.text.count("activations are quantised with dynamic scales, not with the static ones") == 1
        )

    def test_of_a_draft_head(self, tmp_path):
        config = blocks(16, 32)
        raw = {**HEAD, "quantization_config": config}
        folder = write(tmp_path / "head", raw, quantised(random_tensors(head_shapes(HEAD)), config))
        for wanted, dtype, group in (
            *((True, "auto", 32), (False, "auto", None), (None, "auto", None)),
            *((False, "bfloat16", None), (None, "bfloat16", 32)),
        ):
            head = load_draft_head(folder, dtype=dtype, fp8_activations=wanted)
            assert head.config.layers.quantization.row_group == group

    def test_a_draft_head_is_split_rather_than_quantised(self, tmp_path, caplog):
        config, mesh = channels(), mesh_of(1, 2)
        raw = {**HEAD, "quantization_config": config}
        folder = write(tmp_path / "head", raw, quantised(random_tensors(head_shapes(HEAD)), config))
        head = load_draft_head(folder, dtype="bfloat16", mesh=mesh)
        assert head.config.layers.quantization.row_group is None
        assert is_split(head.config, mesh)
        assert not caplog.records
        head = load_draft_head(folder, dtype="bfloat16", mesh=mesh, fp8_activations=True)
        assert head.config.layers.quantization.row_group == 0
        assert "the draft head stays whole on every device" in caplog.text

    @pytest.mark.usefixtures("no_type_checks")
    @pytest.mark.parametrize("load", [load_target, load_draft_head, LLM, AsyncLLM])
    def test_words_are_refused_by_name(self, load):
        with pytest.raises(TypeError, match=r"^fp8_activations must be true, false or None, not 'yes'$"):
            load("folder", fp8_activations="yes")

    def test_of_a_loaded_pair(self, tmp_path):
        raw, tensors = make(*KINDS["smaller than a block"])
        llm = LLM(write(tmp_path / "x", raw, tensors), dtype="float32", fp8_activations=True)
        assert llm.target.config.quantization.fp8_activations
        assert llm.engines.plan.decoder.target.quantization.fp8_activations

    def test_on_a_mesh(self, tmp_path):
        raw, tensors = make({**LARGER, "head_dim": 16, "intermediate_size": 64}, blocks(16, 16))
        folder, tokens = write(tmp_path / "x", raw, tensors), [3, 1, 4, 1, 5]
        expected = self.expected(raw, tensors, tokens)
        target = load_target(folder, dtype="float32", mesh=mesh_of(1, 4), fp8_activations=True)
        got = np.asarray(next_token_logits(target, tokens), np.float64)
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()

    @pytest.mark.parametrize("mesh", [None, (1, 4)])
    def test_devices_store_contracted_axes_last(self, tmp_path, mesh):
        raw, tensors = make({**LARGER, "head_dim": 16, "intermediate_size": 64}, blocks(16, 16))
        folder, mesh = write(tmp_path / "x", raw, tensors), None if mesh is None else mesh_of(*mesh)
        orders = {"qkv_proj": (1, 2, 3, 0), "o_proj": (2, 0, 1)}
        orders |= {"gate_up_proj": (1, 2, 0), "down_proj": (1, 0)}
        for wanted in (True, False):
            layer = load_target(folder, mesh=mesh, fp8_activations=wanted).weights["layers"][0]
            for name, order in orders.items():
                values = layer["self_attn" if name in ("qkv_proj", "o_proj") else "mlp"][name]["values"]
                found = values.format.layout.major_to_minor
                assert found == (order if wanted else tuple(range(values.ndim)))
        assert contracted_last(("expert", "embed", "gate_up", "expert_mlp")) == (0, 2, 3, 1)
        assert contracted_last(("expert", "expert_mlp", "embed")) == (0, 2, 1)

    @pytest.mark.parametrize(
        ("config", "wrong"),
        [
            (
                blocks(16, 16),
                r"self_attn.o_proj: parts of 24 activations cut groups of 16 in FP8 \(layers 0\)",
            ),
            (channels(), r"mlp.down_proj: parts of 32 activations cut groups of 64 in FP8 \(layers 0\)"),
            (
                blocks(16, 128),
                r"mlp.down_proj: parts of 32 activations cut groups of 128 in FP8 \(layers 0\)",
            ),
        ],
    )
    def test_a_cut_through_a_group_is_refused_by_name(self, tmp_path, config, wrong):
        raw, tensors = make({**LARGER, "intermediate_size": 64}, config)
        folder = write(tmp_path / "x", raw, tensors)
        with pytest.raises(ValueError, match=wrong):
            load_target(folder, mesh=mesh_of(1, 2), fp8_activations=True)
        target = load_target(folder, dtype="bfloat16", mesh=mesh_of(1, 2))
        assert target.config.quantization.row_group is None
        llm = LLM(folder, dtype="bfloat16", mesh=mesh_of(1, 2))
        assert llm.target.config.quantization.row_group is None


def test_scales_of_activations_are_left_unread(tmp_path, caplog):
    raw, tensors = make(V4, blocks(128, 128, activation_scheme="static"))
    inputs = {
        name.replace("weight", "input_scale"): np.ones(1, np.float32)
        for name in tensors
        if tensors[name].dtype == FP8
    }
    assert len(inputs) == 21
    read(tmp_path / "x", raw, {**tensors, **inputs})
    assert "21 (scales of activations, which are not read)" in caplog.text


def test_layers_that_the_config_leaves_out_stay_as_they_are(tmp_path):
    config = blocks(128, 128, modules_to_not_convert=["lm_head", "model.layers.1"])
    tensors = random_tensors(target_shapes(V4))
    chosen = quantised(tensors, config, chosen=lambda name, shape: len(shape) > 1 and "layers.1" not in name)
    left = {name: tensors[name] for name in ("lm_head.weight", "model.embed_tokens.weight")}
    held = {key: own for key, own in chosen.items() if not key.startswith(tuple(left))} | left
    weights = read(tmp_path / "x", {**V4, "quantization_config": config}, held)
    assert weights["layers"][1]["mlp"]["down_proj"].dtype == jnp.float32
    assert weights["layers"][2]["mlp"]["down_proj"]["values"].dtype == FP8


BLOCKS = {"blocks": blocks(16, 24), "large blocks": blocks(128, 128), "channels": channels()}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((name, "blocks") for name in NAMES if name not in ("gpt_oss", *MADE_OF_OTHERS)),
        ("qwen3_moe", "large blocks"),
        ("qwen3_moe", "channels"),
    ],
)
def test_every_layout_keeps_each_weight_s_scale(family, kind):
    """Of all families, in all forms of files: value times scale in memory is what the file's matrix means."""
    raw = json.loads((FOLDER / family / "config.json").read_text())
    raw = {**raw, "quantization_config": {**BLOCKS[kind]}}
    rng, config = np.random.default_rng(0), parse_model_config(raw)
    parameters = {own.path: own for own in expected_parameters(config)}
    quantised_paths = [path[:-1] for path in parameters if path[-1] == "values"]
    assert len(quantised_paths) >= 4
    for path in quantised_paths:
        values, scales = parameters[(*path, "values")], parameters[(*path, "scales")]
        for keys, scale_keys in zip(values.forms, scales.forms, strict=True):
            made = np.zeros(values.shape, FP8), np.zeros(scales.shape, np.float32)
            expected = np.zeros(values.shape, np.float32)
            for key, scale_key in zip(keys, scale_keys, strict=True):
                tensor = rng.normal(size=key.file_shapes(values.shape)[0]).astype(FP8)
                own = rng.random(scale_key.file_shapes(scales.shape)[0], np.float32)
                assert scale_key.name == scale_name(key.name, BLOCKS[kind])
                key.from_file(made[0], tensor)
                scale_key.from_file(made[1], own)
                wide = widened({key.name: tensor, scale_key.name: own}, BLOCKS[kind])
                key.from_file(expected, wide[key.name])
                np.testing.assert_array_equal(scale_key.to_file(made[1]), own)
            spread = made[1]
            for axis, (size, block) in enumerate(zip(values.shape, scales.block, strict=True)):
                spread = np.repeat(spread, block, axis=axis).take(range(size), axis=axis)
            np.testing.assert_array_equal(made[0].astype(np.float32) * spread, expected)


class TestMesh:
    def placed(self, folder, mesh, config, **changes):
        raw, tensors = make({**LARGER, "intermediate_size": 64, **changes}, config)
        parsed = parse_model_config(raw)
        check_partition(parsed, mesh)
        write(folder, raw, tensors)
        return parsed, read_weights(folder, parsed, jnp.dtype("float32"), mesh), tensors

    @pytest.mark.parametrize("kind", [blocks(16, 16), channels()], ids=["blocks", "channels"])
    def test_parts(self, tmp_path, kind):
        mesh = mesh_of(1, 4)
        config, weights, tensors = self.placed(tmp_path / "x", mesh, kind)
        whole = read_weights(tmp_path / "x", config, jnp.dtype("float32"))
        for ours, theirs in zip(*map(jax.tree.leaves, (weights, place(whole, config, mesh))), strict=True):
            assert ours.sharding == theirs.sharding
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        # A device's own part, widened with its own scales alone.
        own = weights["layers"][0]["mlp"]["down_proj"]
        wide = widened(tensors, kind)["model.layers.0.mlp.down_proj.weight"].T
        block = quantized_blocks(config)["layers", 0, "mlp", "down_proj"]
        for values, scales in zip(
            own["values"].addressable_shards, own["scales"].addressable_shards, strict=True
        ):
            part = Quantized(values.data, scales.data, block).widened(jnp.dtype("float32"))
            np.testing.assert_array_equal(part, wide[values.index])

    def test_a_cut_through_a_block_is_refused_by_name(self):
        raw, _ = make({**LARGER, "intermediate_size": 48}, blocks(16, 16))
        wrong = r"mlp.gate_up_proj: parts of 24 values cut FP8 blocks of 16 \(layers 0\)"
        with pytest.raises(ValueError, match=wrong):
            check_partition(parse_model_config(raw), mesh_of(1, 2))
