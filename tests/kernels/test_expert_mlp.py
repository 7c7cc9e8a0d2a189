"""expert_mlp against its definition in float64, expert by expert."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels.activation import GELU_TANH, SILU, Activation
from pallas_kernels.expert_mlp import api, expert_mlp, pallas_triton, reference
from pallas_kernels.expert_mlp.config import Config, config_for
from pallas_kernels.expert_mlp.shapes import SHAPES
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import FP8, Quantized, scale_shape
from tests.kernels.activations import FORMULAS, GPT_OSS, STEP
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

# Of a row, relative to its length. Hidden features may be rounded to either side.
TOLERANCE = {jnp.float32: 2e-6, jnp.bfloat16: 1e-2, jnp.float16: 1.5e-3}


class Case(NamedTuple):
    tokens: int
    experts: int
    top_k: int
    size: int
    features: int
    dtype: type = jnp.float32
    activation: Activation = SILU
    biases: bool = False


CASES = [
    Case(1, 4, 1, 32, 24),
    Case(1, 8, 2, 64, 40, jnp.bfloat16, GPT_OSS, True),
    Case(1, 128, 8, 72, 20, jnp.float16, GELU_TANH),
    Case(3, 8, 8, 32, 7, activation=STEP),
    Case(40, 8, 8, 64, 40, activation=GELU_TANH, biases=True),  # some blocks of every expert
    Case(300, 4, 2, 80, 130),
]
MORE_CASES = [
    Case(16, 128, 8, 48, 24, jnp.bfloat16),
    Case(16, 4, 2, 33, 16, activation=GPT_OSS, biases=True),
    Case(40, 128, 1, 32, 24, jnp.bfloat16, STEP),
]


def name_of(case):
    return f"T{case.tokens}-E{case.experts}-K{case.top_k}-I{case.features}"


def make_case(case, seed=0):
    """The arrays of a call. Some ids name no expert, one token none at all, and nobody reads NaN."""
    rng = np.random.default_rng(seed)
    t, e, k, m, i = case[:5]
    experts = np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
    x = rng.standard_normal((t, m))
    if t > 1:
        experts[rng.random((t, k)) < 0.2] = rng.choice([-1, -e, e, 2**31 - 1])
        experts[1] = (e, *[-1] * (k - 1))
        x[1] = np.nan
    gate_up = rng.standard_normal((e, m, 2, i)) / np.sqrt(m) * 2
    down = rng.standard_normal((e, i, m)) / np.sqrt(i)
    biases = rng.standard_normal((e, 2, i)), rng.standard_normal((e, m))
    idle = np.setdiff1d(np.arange(e), experts)
    for array in (gate_up, down, *biases):
        array[idle] = np.nan
    weights = rng.random((t, k), np.float32)
    gate_up_bias, down_bias = (bias.astype(case.dtype) if case.biases else None for bias in biases)
    x, gate_up, down = (array.astype(case.dtype) for array in (x, gate_up, down))
    arrays = x, gate_up, down, experts, weights, gate_up_bias, down_bias
    return jax.tree.map(jnp.asarray, arrays)


def oracle(case, arrays):
    dtype = arrays[0].dtype
    experts = np.asarray(arrays[3])
    x, gate_up, down, _, weights, *biases = (
        None if array is None else np.asarray(array, np.float64) for array in arrays
    )
    y = np.zeros(x.shape)
    for (t, k), e in np.ndenumerate(experts):
        if 0 <= e < case.experts:
            halves = np.einsum("m,mgi->gi", x[t], gate_up[e]) + (biases[0][e] if case.biases else 0)
            hidden = FORMULAS[case.activation](*halves).astype(dtype).astype(np.float64)
            y[t] += weights[t, k] * (hidden @ down[e] + (biases[1][e] if case.biases else 0))
    return y


def test_quantised_experts_are_multiplied_as_they_are_widened():
    case = Case(5, 4, 2, 48, 24, biases=True)
    x, gate_up, down, *rest = make_case(case)
    # Experts that nobody asks for are NaN, as values and as scales.
    quantized = Quantized.of(gate_up, (1, 48, 1, 8)), Quantized.of(down, (1, 8, 48))
    arrays = x, *(own.widened(jnp.dtype(jnp.float32)) for own in quantized), *rest
    names = {"gate_up_bias": rest[2], "down_bias": rest[3]}
    y = np.asarray(expert_mlp(x, *quantized, *rest[:2], **names, activation=SILU))
    expected = oracle(case, arrays)
    distance = np.linalg.norm(y - expected, axis=-1)
    assert (distance <= TOLERANCE[jnp.float32] * np.linalg.norm(expected, axis=-1)).all()
    wrong = Quantized(quantized[0].values, quantized[0].scales, (1, 24, 1, 8))
    with pytest.raises(ValueError, match=r"gate_up's scales is \(4, 1, 2, 3\), expected \(4, 2, 2, 3\)"):
        expert_mlp(x, wrong, quantized[1], *rest[:2], activation=SILU)
    why = "down: scales change after 8 terms, no multiple of 16"
    assert api.OPERATION.table["pallas_triton"].unsupported(x, *quantized) == why


def quantised(stored, gate_up, down):
    if stored == "mxfp4":
        return Mxfp4.of(gate_up, 1), Mxfp4.of(down, 1)
    # One scale of all columns, and of a tile.
    return Quantized.of(gate_up, (1, 64, 1, 128)), Quantized.of(down, (1, 64, 64))


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("mxfp4", jnp.bfloat16), ("mxfp4", jnp.float32), wide("fp8", jnp.bfloat16), wide("mxfp4", jnp.float16)],
)
def test_the_kernel_reads_quantised_experts(stored, dtype):
    case = Case(5, 4, 2, 160, 96, dtype, GPT_OSS, biases=True)
    x, gate_up, down, experts, *rest = make_case(case)
    weights = quantised(stored, *(jnp.nan_to_num(own.astype(jnp.float32)) for own in (gate_up, down)))
    run = jax.jit(partial(pallas_triton.expert_mlp, activation=GPT_OSS, interpret=True))
    expected = oracle(case, (x, *(own.widened(jnp.dtype(jnp.float32)) for own in weights), experts, *rest))
    size = TOLERANCE[dtype] * np.linalg.norm(expected, axis=-1)

    def apart(*weights):
        y = np.asarray(run(x, *weights, experts, *rest), np.float64)
        return np.linalg.norm(y - expected, axis=-1)

    assert (apart(*weights) <= size).all()
    # One wrong scale of an expert that the first token has chosen. MXFP4's scales have the columns first.
    gate_up, down = weights
    place = (experts[0].max(), 3, 1) if stored == "mxfp4" else (experts[0].max(), 1, 2)
    assert all(i < size for i, size in zip(place, down.scales.shape, strict=True)), "JAX drops other updates"
    scales = down.scales.at[place].add(1)
    wrong = type(down)(down.values, scales, down.axis if stored == "mxfp4" else down.block)
    assert apart(gate_up, wrong)[0] > size[0]


@pytest.mark.parametrize(
    ("stored", "tokens"), [("mxfp4", 1), ("fp8", 1), wide("mxfp4", 64), wide("fp8", 512)]
)
def test_lowers_for_cuda_with_quantised_experts(stored, tokens):
    case = next(case for case in PUBLISHED if (case.size, case.tokens) == (2880, tokens))
    x, gate_up, down, *rest = jax.eval_shape(partial(make_shapes, case))
    parts = []
    for own, block in ((gate_up, (1, 128, 1, 128)), (down, (1, 128, 128))):
        if stored == "mxfp4":
            cells = (own.shape[0], *own.shape[2:], own.shape[1] // 32)
            parts += [jax.ShapeDtypeStruct((*cells, 16), jnp.uint8), jax.ShapeDtypeStruct(cells, jnp.uint8)]
        else:
            scales = scale_shape(own.shape, block)
            parts += [jax.ShapeDtypeStruct(own.shape, FP8), jax.ShapeDtypeStruct(scales, jnp.float32)]

    def run(x, *arrays):
        pairs, others = (arrays[:2], arrays[2:4]), arrays[4:]
        blocks = ((1, 128, 1, 128), (1, 128, 128))
        weights = (
            Mxfp4(*pair, 1) if stored == "mxfp4" else Quantized(*pair, block)
            for pair, block in zip(pairs, blocks, strict=True)
        )
        return pallas_triton.expert_mlp(x, *weights, *others, activation=case.activation)

    assert lower_for_gpu(run, x, *parts, *rest).count(KERNEL) == 2 + (case.tokens > 1)


class ExpertMLPSuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls):
        def run(x, gate_up, down, experts, weights, gate_up_bias, down_bias, activation):
            biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
            arrays = x, gate_up, down, experts, weights
            return expert_mlp(*arrays, **biases, activation=activation, implementation=cls.implementation)

        return jax.jit(run, static_argnums=7)

    def run(self, case, arrays):
        y = self.jitted()(*arrays, case.activation)
        assert y.dtype == case.dtype
        return np.asarray(y)

    @pytest.mark.parametrize("case", [*CASES, *map(wide, MORE_CASES)], ids=name_of)
    def test_oracle(self, case):
        arrays = make_case(case)
        y, expected = self.run(case, arrays), oracle(case, arrays)
        distance = np.linalg.norm(y.astype(np.float64) - expected, axis=-1)
        assert (distance <= TOLERANCE[case.dtype] * np.linalg.norm(expected, axis=-1)).all(), distance.max()
        if case.tokens > 1:
            assert (y[1] == 0).all()  # NaN that no expert was asked about
        assert y.tobytes() == self.run(case, arrays).tobytes()

    @pytest.mark.parametrize("experts", [[5, -1, 1, 0], [-1, 7, 9, 1], [2, 3, 4, 5]])
    def test_one_token_whose_experts_lie_elsewhere(self, experts):
        """A device has fewer experts than a token chooses."""
        case = Case(1, 2, 2, 72, 40)
        x, gate_up, down, _, _, *biases = make_case(case)
        weights = jnp.asarray([[0.1, 0.2, 0.3, 0.4]], jnp.float32)
        arrays = x, gate_up, down, jnp.asarray([experts], jnp.int32), weights, *biases
        np.testing.assert_allclose(self.run(case, arrays), oracle(case, arrays), rtol=1e-4, atol=1e-5)

    def test_all_tokens_of_one_expert(self):
        case = CASES[4]._replace(top_k=1)
        x, gate_up, down, _, weights, *biases = make_case(case._replace(tokens=1))
        experts = jnp.full((40, 1), 5, jnp.int32)
        x, weights = jnp.broadcast_to(x, (40, 64)), jnp.linspace(0, 1, 40, dtype=jnp.float32)[:, None]
        gate_up, down, *biases = (jnp.nan_to_num(array, nan=0.1) for array in (gate_up, down, *biases))
        arrays = x, gate_up, down, experts, weights, *biases
        np.testing.assert_allclose(self.run(case, arrays), oracle(case, arrays), rtol=1e-4, atol=1e-5)

    def test_a_favourite_among_others(self):
        """One expert gets every token, in many blocks; others a few."""
        case = Case(100, 24, 2, 72, 40, jnp.bfloat16, GPT_OSS, True)
        x, gate_up, down, experts, *rest = make_case(case)
        experts = np.stack([np.full(100, 7), 8 + np.arange(100) % 16], axis=1).astype(np.int32)
        x, gate_up, down, weights, *biases = (jnp.nan_to_num(array) for array in (x, gate_up, down, *rest))
        arrays = x, gate_up, down, jnp.asarray(experts), weights, *biases
        y, expected = self.run(case, arrays), oracle(case, arrays)
        distance = np.linalg.norm(y.astype(np.float64) - expected, axis=-1)
        assert (distance <= TOLERANCE[case.dtype] * np.linalg.norm(expected, axis=-1)).all(), distance.max()


class TestXla(ExpertMLPSuite):
    implementation = "xla"

    def test_gradients(self):
        case = MORE_CASES[1]._replace(tokens=1)
        *arrays, gate_up_bias, down_bias = make_case(case)
        x, gate_up, down, experts, weights = arrays
        used = experts.reshape(-1)
        gate_up, down, gate_up_bias, down_bias = (
            array[used] for array in (gate_up, down, gate_up_bias, down_bias)
        )

        def loss(*floats):
            x, gate_up, down, weights, *biases = floats
            own = jnp.arange(2, dtype=jnp.int32)[None]
            return jnp.sum(
                jnp.sin(reference.expert_mlp(x, gate_up, down, own, weights, *biases, activation=GPT_OSS))
            )

        floats = x, gate_up, down, weights, gate_up_bias, down_bias
        check_grads(jax.jit(loss), floats, order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


class TestPallasTritonInterpreted(ExpertMLPSuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        stand_in(api, partial(pallas_triton.expert_mlp, interpret=True))


PUBLISHED = [
    Case(tokens, s.experts, s.routing.top_k, s.size, s.features, jnp.bfloat16, s.activation, s.biases)
    for s in SHAPES
    for tokens in (1, 64, 512)
]


@pytest.mark.parametrize(
    "case", [*CASES[1:3], *PUBLISHED[:3:2], *map(wide, [CASES[5], *PUBLISHED[4::3]])], ids=name_of
)
def test_lowers_for_cuda(case):
    arrays = list(jax.eval_shape(partial(make_shapes, case)))
    arrays[5:] = arrays[5:] if case.biases else (None, None)
    run = partial(pallas_triton.expert_mlp, activation=case.activation)
    assert lower_for_gpu(run, *arrays).count(KERNEL) == 2 + (case.tokens > 1)


def make_shapes(case):
    t, e, k, m, i, dtype = case[:6]
    sizes = (t, m), (e, m, 2, i), (e, i, m), (t, k), (t, k), (e, 2, i), (e, m)
    dtypes = dtype, dtype, dtype, jnp.int32, jnp.float32, dtype, dtype
    return tuple(jnp.zeros(*pair) for pair in zip(sizes, dtypes, strict=True))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("stored", ["plain", "fp8", "fp8_rows", "mxfp4"])
@pytest.mark.parametrize("case", PUBLISHED, ids=name_of)
def test_configurations(case, stored, itemsize):
    """Programs enough, blocks that hold what an expert gets on average, and tiles that fit."""
    t, e, k, m, i = case[:5]
    config = config_for(stored=stored, tokens=t, top_k=k, experts=e, size=m, features=i, itemsize=itemsize)
    groups = min(t * k, e)
    for total, block in ((i, config.block_features), (m, config.block_model)):
        assert groups * -(-total // block) >= 256 or block <= 64
    if itemsize == 2:
        assert config.block_rows >= min(128, t * k / e)
    widest = max(2 * config.block_features, config.block_model)
    weight = {"plain": itemsize, "fp8": 1, "fp8_rows": 1, "mxfp4": 0.5}[stored]
    row = 1 if stored == "fp8_rows" else itemsize
    step = config.block_depth * (config.block_rows * row + widest * weight)
    assert config.num_stages * step <= 80 << 10
    if stored == "fp8" and itemsize == 2:
        assert min(config.block_features, config.block_model) >= 4 * 8 * min(4, config.num_warps)


@pytest.mark.parametrize(
    ("stored", "tokens", "fastest"),
    [
        ("plain", 64, Config(16, 64, 128, 64, 4, 4)),
        ("plain", 128, Config(32, 64, 128, 64, 4, 4)),
        ("mxfp4", 1, Config(16, 32, 32, 256, 4, 3)),
        ("mxfp4", 64, Config(16, 64, 128, 128, 4, 3)),
        ("mxfp4", 128, Config(32, 64, 128, 128, 4, 3)),
        ("mxfp4", 256, Config(64, 64, 128, 128, 4, 3)),
        ("fp8", 1, Config(16, 32, 32, 128, 1, 4)),
        ("fp8", 16, Config(16, 128, 128, 64, 4, 4)),
        ("fp8", 128, Config(16, 128, 128, 64, 4, 4)),
        ("fp8_rows", 1, Config(16, 32, 64, 128, 2, 4)),
        ("fp8_rows", 128, Config(16, 32, 64, 128, 2, 4)),
    ],
)
def test_configurations_that_were_measured(stored, tokens, fastest):
    gpt_oss = {"top_k": 4, "experts": 32, "size": 2880, "features": 2880}
    qwen = {"top_k": 8, "experts": 128, "size": 2048, "features": 768}
    sizes = gpt_oss if stored == "mxfp4" else qwen
    assert config_for(stored=stored, tokens=tokens, itemsize=2, **sizes) == fastest


def test_configurations_are_checked():
    with pytest.raises(
        ValueError, match="block_rows must be a power of two of at least 16, not 8; num_stages"
    ):
        Config(8, 64, 64, 64, num_warps=4, num_stages=0)


def test_xla_takes_no_kernel_for_its_products(monkeypatch):
    """Where products alone would take theirs: on Hopper, with FP8 in blocks."""
    for place in ("pallas_kernels.dispatch", "pallas_kernels.matmul.api"):
        monkeypatch.setattr(f"{place}.gpu_problem", lambda: None)
        monkeypatch.setattr(f"{place}.compute_capability", lambda: (9, 0))
    case = Case(3, 4, 2, 256, 128, jnp.bfloat16)
    x, gate_up, down, experts, weights, *_ = make_case(case)
    quantized = Quantized.of(gate_up, (1, 128, 1, 128)), Quantized.of(down, (1, 128, 128))
    run = partial(expert_mlp, activation=SILU, implementation="xla")
    assert lower_for_gpu(run, x, *quantized, experts, weights).count(KERNEL) == 0


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({0: jnp.zeros(3)}, r"x must be \[T, M\], down \[E, I, M\] and experts \[T, K\], got \(3,\)"),
            ({0: jnp.zeros((3, 32), jnp.int32)}, "x holds int32, expected float32, bfloat16, float16"),
            ({1: jnp.zeros((8, 32, 14))}, r"gate_up is \(8, 32, 14\), expected \(8, 32, 2, 7\)"),
            ({4: jnp.zeros((3, 7), jnp.bfloat16)}, r"weights is \(3, 7\).*; weights holds bfloat16"),
            ({5: jnp.zeros((8, 7))}, r"gate_up_bias is \(8, 7\), expected \(8, 2, 7\)"),
        ],
    )
    def test_arrays(self, changes, message):
        arrays = list(make_case(CASES[3]))
        for place, array in changes.items():
            arrays[place] = array
        with pytest.raises(ValueError, match=f"expert_mlp: .*{message}"):
            partial(expert_mlp, gate_up_bias=arrays[5], down_bias=arrays[6])(*arrays[:5], activation=SILU)
