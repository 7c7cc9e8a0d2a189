"""qkv_rotary against its definition in float64."""

from dataclasses import astuple, dataclass, replace
from functools import cache, partial
from itertools import starmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.differentiable import differentiable
from pallas_kernels.qkv_rotary import api, pallas_triton, qkv_rotary, reference
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

EPS = 1e-3  # large enough to matter
# Relative to a head's largest element, as rotary mixes two: five roundings of each.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1.5e-2, jnp.float16: 2e-3}
# B, N, G, R, E, and a dtype; one has keys and values alone.
CASES = [
    ((2, 3, 3, 5, 16), jnp.float32),
    ((2, 3, 3, 5, 16), jnp.bfloat16),
    ((2, 5, 2, 1, 64), jnp.float32),
    ((1, 2, 2, 0, 32), jnp.float32),
]
MORE_CASES = [((1, 1, 2, 4, 16), jnp.bfloat16), ((1, 7, 1, 3, 128), jnp.float16)]


@dataclass(frozen=True)
class Case:
    qkv: np.ndarray
    q_weight: np.ndarray | None
    k_weight: np.ndarray | None
    cos: np.ndarray
    sin: np.ndarray
    norm_values: bool = False

    def args(self):
        return astuple(self)[:-1]


def make_case(shape, dtype=jnp.float32, weight_dtype=None, half=None):
    batch, nodes, groups, ratio, size = shape
    rng = np.random.default_rng(0)
    angles = rng.uniform(-4, 4, (batch, nodes, half or size // 2))
    weights = 1 + 0.5 * rng.standard_normal((2, size))
    return Case(
        (2 * rng.standard_normal((batch, nodes, groups, ratio + 2, size))).astype(dtype),
        *weights.astype(weight_dtype or dtype),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
    )


def only(norms, case):
    """A case with no norms but those in `norms`, of "qk"."""
    return replace(
        case,
        q_weight=case.q_weight if "q" in norms else None,
        k_weight=case.k_weight if "k" in norms else None,
    )


def oracle(case):
    """The definition, a pair of elements as one complex number."""
    qkv, q_weight, k_weight, cos, sin = (
        None if x is None else np.asarray(x, np.float64) for x in case.args()
    )
    turn = (cos + 1j * sin)[:, :, None, :]
    half = cos.shape[-1]

    def norm(x, weight):
        return x if weight is None else x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight

    def head(x, weight):
        x = norm(x, weight)
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    heads = np.moveaxis(qkv, 3, 0)
    queries = [head(q, q_weight) for q in heads[:-2]]
    q = np.stack(queries, axis=3) if queries else qkv[:, :, :, :0]
    return q, head(heads[-2], k_weight), norm(heads[-1], 1 if case.norm_values else None)


class QkvRotarySuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls):
        function = partial(qkv_rotary, eps=EPS, implementation=cls.implementation)
        return jax.jit(function, static_argnames=("weight_offset", "norm_values"))

    def run(self, *args, **settings):
        return self.jitted()(*args, **settings)

    def check(self, case):
        out = self.run(*case.args(), norm_values=case.norm_values)
        for one, expected in zip(out, oracle(case), strict=True):
            assert one.shape == expected.shape
            assert one.dtype == case.qkv.dtype
            scale = np.abs(expected).max(axis=-1, keepdims=True)
            one = np.asarray(one, np.float64)
            np.testing.assert_allclose(
                one / scale, expected / scale, rtol=0, atol=TOLERANCE[case.qkv.dtype.type]
            )
        if not case.norm_values:
            np.testing.assert_array_equal(out[2], case.qkv[:, :, :, -1])

    @pytest.mark.parametrize(("shape", "dtype"), [*CASES, *starmap(wide, MORE_CASES)])
    def test_oracle(self, shape, dtype):
        self.check(make_case(shape, dtype))

    @pytest.mark.parametrize("norms", [wide(""), "q", "k"])
    def test_norms(self, norms):
        self.check(only(norms, make_case((2, 3, 2, 4, 16), jnp.float16)))

    @pytest.mark.parametrize("dtype", [wide(jnp.float32), jnp.bfloat16])
    def test_values_with_a_norm(self, dtype):
        self.check(replace(make_case((2, 3, 2, 4, 16), dtype), norm_values=True))

    @pytest.mark.parametrize("half", [wide(1), 4, wide(12)])
    def test_a_part_of_each_head_turns(self, half):
        self.check(make_case((2, 3, 2, 3, 32), jnp.float32, half=half))
        self.check(only("", make_case((1, 2, 2, 0, 32), jnp.bfloat16, half=half)))

    def test_wide_weights(self):
        """They multiply before anything is rounded: one by 1 + 2^-12 may change a bfloat16, not only by 1."""
        case = make_case((2, 3, 3, 5, 16), jnp.bfloat16, jnp.float32)
        ones, wide = np.ones(16, np.float32), np.full(16, 1 + 2**-9, np.float32)
        cos, sin = np.ones_like(case.cos), np.zeros_like(case.sin)
        exact = oracle(replace(case, q_weight=wide, k_weight=wide, cos=cos, sin=sin))
        q, k, _ = self.run(case.qkv, wide, wide, cos, sin)
        for one, expected in zip((q, k), exact[:2], strict=True):
            rounded = np.asarray(expected, np.float32).astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(one), rounded)
        one = np.asarray(self.run(case.qkv, ones, ones, cos, sin)[1])
        assert np.any(np.asarray(k) != one)
        rounded = self.run(case.qkv, *(wide.astype(jnp.bfloat16),) * 2, cos, sin)[1]
        np.testing.assert_array_equal(rounded, one)

    @pytest.mark.parametrize("offset", [wide(0.0), 1.0])
    def test_an_offset(self, offset):
        """Bit for bit as with the sums, in float32, as weights, and not as without one."""
        case = replace(make_case((2, 3, 3, 5, 16), jnp.bfloat16), norm_values=True)
        q_wide, k_wide = (offset + weight.astype(np.float32) for weight in (case.q_weight, case.k_weight))
        results = self.run(*case.args(), weight_offset=offset, norm_values=True)
        wide = self.run(case.qkv, q_wide, k_wide, case.cos, case.sin, norm_values=True)
        jax.tree.map(np.testing.assert_array_equal, results, wide)
        narrow = self.run(*case.args(), norm_values=True)
        assert [np.array_equal(*pair) for pair in zip(results, narrow, strict=True)] == [False, False, True]

    def test_no_angle(self):
        """A rotation by nothing leaves every bit, and one by half a turn every bit but the signs."""
        case = only("", make_case((2, 3, 3, 5, 16), jnp.bfloat16))
        for sign in (1, -1):
            cos, sin = np.full_like(case.cos, sign), np.zeros_like(case.sin)
            q, k, v = map(np.asarray, self.run(case.qkv, None, None, cos, sin))
            joined = np.concatenate([q * sign, k[:, :, :, None] * sign, v[:, :, :, None]], axis=3)
            np.testing.assert_array_equal(joined, case.qkv)

    def test_rows_are_independent(self):
        case = make_case((2, 3, 3, 5, 16), jnp.bfloat16)
        together = self.run(*case.args())
        alone = replace(case, **{name: getattr(case, name)[1:, 1:2] for name in ("qkv", "cos", "sin")})
        for one, other in zip(self.run(*alone.args()), together, strict=True):
            np.testing.assert_array_equal(one, other[1:, 1:2])


class TestXla(QkvRotarySuite):
    implementation = "xla"

    @pytest.mark.parametrize("shape", [(1, 0, 2, 4, 16), (1, 3, 2, 4, 6), (1, 1, 1, 3, 96)], ids=str)
    def test_sizes_that_the_kernel_refuses(self, shape):
        self.check(make_case(shape))


class TestPallasTritonInterpreted(QkvRotarySuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        kernel = partial(pallas_triton.qkv_rotary, interpret=True)
        stand_in(api, differentiable(kernel, reference.qkv_rotary))

    @pytest.mark.parametrize(
        ("norms", "dtype", "settings"),
        [
            ("", jnp.bfloat16, {}),
            wide("qk", jnp.float32, {}),
            ("qk", jnp.bfloat16, {"weight_offset": 1.0, "norm_values": True}),
        ],
    )
    def test_gradients(self, norms, dtype, settings):
        case = only(norms, make_case((2, 3, 2, 3, 16), dtype))

        def loss(function, *args):
            return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in function(*args))

        wanted = (0, 1, 2, 3, 4) if norms else (0, 3, 4)
        by_reference = partial(reference.qkv_rotary, eps=EPS)
        gradients = [
            jax.jit(jax.grad(partial(loss, partial(function, **settings)), wanted))(*case.args())
            for function in (self.run, by_reference)
        ]
        for one, other in zip(*gradients, strict=True):
            assert one.dtype == other.dtype
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(one, other, rtol=0, atol=8 * TOLERANCE[dtype] * np.abs(other).max())


@pytest.mark.parametrize(
    ("shape", "dtype", "norms"),
    [
        *(((2, 128, 8, 4, 128), dtype, "qk") for dtype in TOLERANCE),
        ((1, 1, 1, 71, 64), jnp.bfloat16, "qk"),
        wide((1, 1, 2, 8, 512), jnp.bfloat16, ""),
        wide((1, 2, 2, 0, 32), jnp.float32, ""),
    ],
)
def test_lowers_for_cuda(shape, dtype, norms):
    args = only(norms, make_case(shape, dtype)).args()
    assert lower_for_gpu(partial(pallas_triton.qkv_rotary, eps=EPS), *args).count(KERNEL) == 1


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((1, 1, 8, 6, 128), None),
        ((1, 1, 1, 130, 128), None),
        ((1, 1, 1, 131, 128), "129 query heads of 128 elements are too many for one program"),
        ((1, 1, 8, 6, 96), "head size 96 is not a power of two in 16..512"),
        ((1, 1, 8, 6, 1024), "head size 1024 is not a power of two in 16..512"),
        ((1, 0, 8, 6, 128), "qkv has no elements"),
    ],
)
def test_unsupported_shape(shape, reason):
    assert pallas_triton.unsupported(jnp.zeros(shape)) == reason


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("qkv", lambda x: x[0], r"qkv must be \[B, N, G, R \+ 2, E\], got \(3, 2, 6, 16\)"),
            ("qkv", lambda x: x.astype(np.int32), "qkv holds int32, expected float32, bfloat16, float16"),
            ("qkv", lambda x: x[:, :, :, :1], "qkv has 1 heads in a group: no key or no value"),
            ("qkv", lambda x: x[..., :15], "heads of 15 elements do not split into halves"),
            ("q_weight", lambda x: x[1:], r"q_weight is \(15,\), expected \(16,\)"),
            ("cos", lambda x: x[:, 1:], r"cos is \(1, 2, 8\), expected \(1, 3, 8\)"),
        ],
    )
    def test_arrays(self, name, change, message):
        case = make_case((1, 3, 2, 4, 16))
        with pytest.raises(ValueError, match=f"qkv_rotary: .*{message}"):
            qkv_rotary(*replace(case, **{name: change(getattr(case, name))}).args(), eps=EPS)

    def test_all_at_once(self):
        case = make_case((1, 3, 2, 4, 16))
        with pytest.raises(ValueError, match=r"q_weight is \(15,\).*sin is \(1, 2, 8\)"):
            qkv_rotary(*replace(case, q_weight=case.q_weight[1:], sin=case.sin[:, 1:]).args(), eps=EPS)
