"""least_kept against a sort in float64."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.token_filter import api, least_kept, pallas_triton, reference
from pallas_kernels.token_filter.reference import _threshold, float_at
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide
from tests.meshes import agreed, on_parts, padded

# Vocabularies of part of a kernel's chunk, of two chunks and of no whole number of them.
CASES = [
    (1000, jnp.float32),
    (1000, jnp.float16),
    (5000, jnp.bfloat16),
    wide(1000, jnp.bfloat16),
    wide(5000, jnp.float32),
    wide(8192, jnp.bfloat16),
]
# A token may fall on either side of top_p or min_p if what decides, in float32, comes so close.
NEAR = 1e-5


class Filter(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def is_active(self):
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def scaled(self, scale):
        """Settings near these, which keep less if `scale` is below 1."""
        return self._replace(
            top_p=min(self.top_p * scale, 1) if self.top_p < 1 else 1, min_p=self.min_p / scale
        )


FILTERS = [
    Filter(),
    Filter(temperature=0),
    Filter(temperature=0, top_k=3, top_p=0.5, min_p=0.5),
    Filter(top_k=1),
    Filter(top_k=5, temperature=0.3),
    Filter(top_k=999),
    Filter(top_k=100_000),
    Filter(top_k=2**31 - 1),
    Filter(top_p=1e-6),
    Filter(top_p=0.6),
    Filter(top_p=0.9, temperature=0.01),
    Filter(top_p=0.95, temperature=1.7),
    Filter(top_p=0.999, temperature=100),
    Filter(min_p=0.2),
    Filter(min_p=1),
    Filter(min_p=2),  # the likeliest token is always kept
    Filter(min_p=1e-4, temperature=0.5),
    Filter(top_k=50, top_p=0.7),
    Filter(top_k=50, top_p=1 - 2**-24),  # rounding must not let in what top-k left out
    Filter(top_k=100_000, top_p=0.7),
    Filter(top_p=0.9, min_p=0.03),
    Filter(top_k=20, min_p=0.3, temperature=2),
    Filter(top_k=20, top_p=0.9, min_p=0.1, temperature=0.7),
]


def settings_of(filters):
    """The arrays of all slots, in the operation's order."""
    dtypes = np.float32, np.int32, np.float32, np.float32
    columns = zip(*filters, strict=True)
    return [np.array(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]


@cache
def make_logits(vocab, dtype):
    """Of each slot: a row of many ties, one without, one with impossible tokens, and one of equals."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (len(FILTERS), 4, vocab))
    logits[:, 0] = np.round(logits[:, 0])
    logits[:, 2, rng.random(vocab) < 0.3] = -np.inf
    logits[:, 3] = -2.5
    return logits.astype(dtype)


def kept_by(own, row):
    """The definition: one filter after the other, and what ties with the last one kept is kept."""
    row = row.astype(np.float64)
    kept = np.ones(row.shape, bool)
    if not own.is_active():
        return kept
    falling = -np.sort(-row)
    if own.top_k:
        kept &= row >= falling[min(own.top_k, len(row)) - 1]
    if own.top_p < 1:
        weights = np.exp((falling[: kept.sum()] - falling[0]) / own.temperature)
        reached = np.cumsum(weights)
        kept &= row >= falling[np.searchsorted(reached, own.top_p * reached[-1])]
    if own.min_p:
        kept &= np.exp((row - falling[0]) / own.temperature) >= min(own.min_p, 1)
    return kept


def keeps(least, logits):
    """Which tokens are at or above their row's threshold."""
    return logits.astype(np.float32) >= least[:, :, None]


class TokenFilterSuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls):
        return jax.jit(partial(least_kept, implementation=cls.implementation))

    def run(self, logits, filters):
        least = np.asarray(self.jitted()(logits, *settings_of(filters)))
        assert least.dtype == np.float32
        assert least.shape == logits.shape[:2]
        return least

    @pytest.mark.parametrize(("vocab", "dtype"), CASES)
    def test_is_the_sort(self, vocab, dtype):
        logits = make_logits(vocab, dtype)
        kept = keeps(self.run(logits, FILTERS), logits)
        clear = 0
        for b, n in np.ndindex(kept.shape[:2]):
            fewest, most = (kept_by(FILTERS[b].scaled(scale), logits[b, n]) for scale in (1 - NEAR, 1 + NEAR))
            assert not (fewest & ~kept[b, n]).any(), (FILTERS[b], n)
            assert not (kept[b, n] & ~most).any(), (FILTERS[b], n)
            clear += np.array_equal(fewest, most)
        assert clear > 0.95 * kept.shape[0] * kept.shape[1]

    def test_nothing_is_dropped_where_nothing_filters(self):
        least = self.run(make_logits(1000, jnp.float32), FILTERS)
        inactive = [not own.is_active() for own in FILTERS]
        assert (least[inactive] == -np.inf).all()
        assert np.isfinite(least[np.logical_not(inactive), 0]).all()

    def test_batch_equals_alone(self):
        logits = make_logits(1000, jnp.float32)
        together = keeps(self.run(logits, FILTERS), logits)
        for b, own in enumerate(FILTERS):
            alone = keeps(self.run(logits[b : b + 1], [own]), logits[b : b + 1])
            np.testing.assert_array_equal(alone[0], together[b], err_msg=str(own))

    def test_second_call_has_the_same_bits(self):
        logits = make_logits(5000, jnp.bfloat16)
        np.testing.assert_array_equal(self.run(logits, FILTERS), self.run(logits, FILTERS))


class TestXla(TokenFilterSuite):
    implementation = "xla"


class TestParts(TokenFilterSuite):
    @classmethod
    @cache
    def jitted(cls):
        run = on_parts(least_kept, 2, 4)
        return lambda logits, *settings: agreed(run(logits, *settings))


class TestPallasTritonInterpreted(TokenFilterSuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        stand_in(api, partial(pallas_triton.least_kept, interpret=True))


@pytest.mark.parametrize(
    ("mesh", "vocab", "dtype"),
    [
        ((1, 2), 64, jnp.float32),
        ((2, 4), 64, jnp.bfloat16),
        ((2, 2), 67, jnp.float32),
        *(wide((2, n), vocab, jnp.bfloat16) for n in (2, 4) for vocab in (67, 1000)),
        wide((1, 3), 1000, jnp.float16),
    ],
)
def test_parts_have_the_bits_of_the_whole(mesh, vocab, dtype):
    """Of thresholds that no float32 sum decides; rows of NaN, or with all tokens in one part, too."""
    parts = mesh[0] * mesh[1]
    filters = [own for own in FILTERS if own.top_p == 1]
    logits = make_logits(vocab, dtype)[: len(filters)].copy()
    logits[:, 1, 3:] = -np.inf
    logits[:, 2] = np.nan
    settings = settings_of(filters)
    found = agreed(on_parts(least_kept, *mesh)(padded(logits, parts), *settings))
    whole = np.asarray(TestXla.jitted()(logits, *settings))
    np.testing.assert_array_equal(keeps(found, logits), keeps(whole, logits))
    # Where all is kept, padding is too: then the least is -inf.
    same = [vocab % parts == 0 or 0 < own.top_k < vocab for own in filters]
    assert sum(same) >= 3
    np.testing.assert_array_equal(found[same].view(np.uint32), whole[same].view(np.uint32))


def test_the_kernel_cannot_sum_over_devices(monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
    chosen = []

    def choose(name, logits):
        chosen.append(api.OPERATION.choose(name, logits))
        return logits

    logits = np.zeros((1, 1, 8), np.float32)
    on_parts(partial(choose, None), 1, 1)(logits)
    on_parts(partial(choose, None), 1, 2)(logits)
    assert chosen == [pallas_triton.least_kept, reference.least_kept]
    with pytest.raises(NotImplementedError, match="sums over whole rows, and 2 devices each hold a part"):
        on_parts(partial(choose, "pallas_triton"), 1, 2)(logits)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_threshold_by_hand(dtype):
    logits = jnp.asarray([[[5, 3, 3, 1]]], dtype)
    goals = {1: 5, 2: 3, 3: 3, 4: 1, 5: -np.inf}
    ones = partial(jnp.ones, (1, 1, 1), jnp.int32)
    found = [float(_threshold(logits, ones, jnp.array([[goal]]))[0, 0]) for goal in goals]
    assert found == list(goals.values())


def test_floats_in_order():
    ranks = jnp.array([[0x007F, 0x407F, 0x7FFF, 0x8000, 0xBF80, 0xFF80]], jnp.uint32)
    values = float_at(ranks, jnp.dtype(jnp.bfloat16))
    bits = np.asarray(values).view(np.uint16)
    assert bits[0].tolist() == [0xFF80, 0xBF80, 0x8000, 0x0000, 0x3F80, 0x7F80]
    assert values[0].tolist() == [-np.inf, -1, -0.0, 0, 1, np.inf]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        size = 8 * jnp.dtype(dtype).itemsize
        ranks = np.linspace(0, 2**size - 1, 4096).astype(np.uint32)[None]
        ordered = np.asarray(float_at(jnp.asarray(ranks), jnp.dtype(dtype)), np.float64)[0]
        assert (ordered[1:] >= ordered[:-1]).all()
        assert (ordered[0], ordered[-1]) == (-np.inf, np.inf)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1000, jnp.float16), (151_936, jnp.float32), (151_936, jnp.bfloat16)]
)
def test_lowers_for_cuda(vocab, dtype):
    logits = jax.ShapeDtypeStruct((2, 16, vocab), dtype)
    settings = settings_of([Filter()] * 2)
    assert lower_for_gpu(pallas_triton.least_kept, logits, *settings).count(KERNEL) == 1


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"logits": np.zeros((2, 3, 5), np.int32)}, "logits must be floating .*, got int32"),
            ({"temperature": np.zeros(3, np.float32)}, r"temperature is \(3,\), expected \(2,\)"),
            ({"top_k": np.zeros(2, np.float32)}, "top_k holds float32, expected integer"),
            (
                {"top_p": np.zeros(1, np.float32), "min_p": np.zeros(2, np.int8)},
                "top_p is .*; min_p holds int8",
            ),
        ],
    )
    def test_arrays(self, changes, message):
        names = "temperature", "top_k", "top_p", "min_p"
        call = {"logits": np.zeros((2, 3, 5), np.float32)}
        call |= dict(zip(names, settings_of([Filter()] * 2), strict=True))
        with pytest.raises(ValueError, match=f"least_kept: {message}"):
            least_kept(**call | changes)
