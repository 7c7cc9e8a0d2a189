"""gated_delta and advance against the recurrence, one token after the other, in float64."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta import advance, gated_delta, reference
from tests.float64 import UNIT

call = jax.jit(lambda case: gated_delta(*case.tokens, case.state, parents=case.parents))
jitted_advance = jax.jit(advance)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Case:
    tokens: tuple
    state: np.ndarray | None
    parents: np.ndarray | None

    def astype(self, dtype):
        return replace(
            self, **jax.tree.map(lambda x: x.astype(dtype), {"tokens": self.tokens, "state": self.state})
        )


def unit(x):
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True))


def make_case(seed, parents, heads=(1, 2), sizes=(16, 16), correlation=0.0, chain=False):
    """Random tokens. Keys have a part in common, as ``correlation`` says."""
    rng = np.random.default_rng(seed)
    batch, rows = parents.shape
    (key_heads, value_heads), (key_size, value_size) = heads, sizes
    q, k = rng.standard_normal((2, batch, rows, key_heads, key_size))
    common = rng.standard_normal((batch, 1, key_heads, key_size))
    k = np.sqrt(1 - correlation) * k + np.sqrt(correlation) * common
    v = rng.standard_normal((batch, rows, value_heads, value_size))
    decay = -np.exp(rng.standard_normal((batch, rows, value_heads)))
    beta = 1 / (1 + np.exp(-rng.standard_normal((batch, rows, value_heads))))
    state = 0.3 * rng.standard_normal((batch, value_heads, key_size, value_size))
    tokens = unit(q) * key_size**-0.5, unit(k), v, decay, beta
    # What float32 rounds is the same for it and for the oracle.
    tokens, state = jax.tree.map(lambda x: x.astype(np.float32).astype(np.float64), (tokens, state))
    return Case(tokens, state, None if chain else parents)


def random_tree(rng, rows, depth):
    """Parents of one tree, each before its children, none deeper than ``depth``."""
    parents, depths = [-1], [0]
    while len(parents) < rows:
        # Among the last nodes, so that trees become deep.
        parent = int(rng.integers(max(len(parents) - 6, 0), len(parents)))
        while depths[parent] == depth:
            parent = parents[parent]
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return np.array(parents, np.int32)


def chain_of(rows):
    return np.arange(rows, dtype=np.int32)[None] - 1


def recurrence(case, parents):
    """Outputs, deltas, and the state after every node: the definition."""
    q, k, v, decay, beta = case.tokens
    batch, rows, heads, size = v.shape
    q, k = (np.repeat(x, heads // k.shape[2], axis=2) for x in (q, k))
    out, delta, states = np.zeros_like(v), np.zeros_like(v), np.zeros((batch, rows, heads, k.shape[3], size))
    for b, i in np.ndindex(batch, rows):
        before = states[b, parents[b, i]] if parents[b, i] >= 0 else case.state[b]
        for h in range(heads):
            state = np.exp(decay[b, i, h]) * before[h]
            delta[b, i, h] = beta[b, i, h] * (v[b, i, h] - k[b, i, h] @ state)
            state += np.outer(k[b, i, h], delta[b, i, h])
            states[b, i, h], out[b, i, h] = state, q[b, i, h] @ state
    return out, delta, states


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(int(node))
        node = parents[node]
    return path[::-1]


def states_after(case, delta, parents, nodes, most):
    """The states after the paths to these nodes of each sequence; what follows a path is no node."""
    paths = [path_to(own, node) for own, node in zip(parents, nodes, strict=True)]
    garbage = [-1, 10**6, -7, 2**31 - 1] * most
    path = np.array([[*own, *garbage][:most] for own in paths], np.int32)
    count = np.array([len(own) for own in paths], np.int32)
    return jitted_advance(case.state, case.tokens[1], delta, case.tokens[3], path, count)


def furthest(one, other):
    return np.max(np.abs(np.asarray(one, np.float64) - other))


def shuffled(rng, parents):
    """Another order of the same nodes, each after its parent: places of the old ones, and the parents."""
    rows, order = len(parents), []
    free = [0]
    while free:
        node = free.pop(int(rng.integers(len(free))))
        order.append(node)
        free += [int(child) for child in np.flatnonzero(parents == node)]
    place = np.empty(rows, np.int32)
    place[order] = np.arange(rows)
    return place, np.array([-1 if parents[old] < 0 else place[parents[old]] for old in order], np.int32)


def bound_in_float32(case, expected):
    """How far float32 may be from what is expected.

    Each element is a sum over the key's elements and over the tokens before. No token's update lengthens a
    state, so that an earlier error does not grow: n terms of at most the largest size, and n roundings.
    """
    terms = case.tokens[1].shape[1] + case.tokens[1].shape[3]
    return terms * UNIT * np.abs(expected).max()


def test_trees_in_float64():
    """Outputs and the states after random paths, of 50 trees of random sizes, padded to one of two."""
    rng = np.random.default_rng(50)
    with jax.enable_x64(True):
        for seed in range(50):
            rows = 256 if seed % 3 == 0 else 64
            real = int(rng.integers(2, rows + 1)) if seed else rows
            tree = random_tree(rng, real, 16)
            _, tree = shuffled(rng, tree)
            parents = np.array([[*tree, *[-1] * (rows - real)]], np.int32)
            case = make_case(seed, parents, correlation=0.9 * (seed % 2))
            out, delta, states = recurrence(case, parents)
            got = call(case)
            assert got.out.dtype == jnp.float64
            assert furthest(got.out, out) < 1e-12
            assert furthest(got.delta, delta) < 1e-12
            for node in [0, real - 1, *rng.integers(0, real, 4)]:
                after = states_after(case, got.delta, parents, [node], 17)
                assert furthest(after, states[:, node]) < 1e-12


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_float32_at_real_size(correlation):
    parents = random_tree(np.random.default_rng(5), 128, 15)[None]
    case = make_case(7, parents, heads=(1, 3), sizes=(128, 128), correlation=correlation)
    out, _, states = recurrence(case, parents)
    case = case.astype(np.float32)
    got = call(case)
    assert furthest(got.out, out) < bound_in_float32(case, out)
    for node in (0, 40, 99, 127):
        after = states_after(case, got.delta, parents, [node], 16)
        assert furthest(after, states[:, node]) < bound_in_float32(case, states[:, node])


def by_root_sums(decay, seen):
    """The decay between two tokens as it must not be computed: as a difference of sums from the root."""
    sums = jnp.einsum("bij,bjv->bvi", seen.astype(decay.dtype), decay)
    return jnp.exp(jnp.where(seen[:, None], sums[..., :, None] - sums[..., None, :], -jnp.inf))


@pytest.mark.parametrize("rows", ["tree", "chain"])
def test_weak_decays_after_strong_ones(rows, monkeypatch):
    """-160 on each of 8 levels, then -0.001: what differences of root sums get wrong by 1e-4."""
    parents = chain_of(64) if rows == "chain" else random_tree(np.random.default_rng(2), 64, 16)[None]
    depths = np.array([len(path_to(parents[0], node)) - 1 for node in range(64)])
    assert depths.max() >= 16
    case = make_case(3, parents, sizes=(64, 64), correlation=0.9, chain=rows == "chain")
    q, k, v, decay, beta = case.tokens
    decay = np.broadcast_to(np.where(depths < 8, -160, -0.001)[None, :, None], decay.shape)
    case = replace(case, tokens=(q, k, v, decay.astype(np.float32).astype(np.float64), beta))
    out, delta, states = recurrence(case, parents)
    case = case.astype(np.float32)
    got, deepest = call(case), int(depths.argmax())
    assert furthest(got.out, out) < bound_in_float32(case, out)
    assert furthest(got.delta, delta) < bound_in_float32(case, delta)
    after = states_after(case, got.delta, parents, [deepest], 64)
    assert furthest(after, states[:, deepest]) < bound_in_float32(case, states[:, deepest])

    monkeypatch.setattr(reference, "_decay_between", by_root_sums)
    wrong = jax.jit(lambda case: gated_delta(*case.tokens, case.state, parents=case.parents))(case)
    assert furthest(wrong.out, out) > bound_in_float32(case, out)
    assert furthest(wrong.delta, delta) > bound_in_float32(case, delta)


@pytest.mark.parametrize("rows", [1, 7, 300, 600])
def test_chains(rows, monkeypatch):
    """One token, a chunk, and several, which are no multiple of it; also as a tree, and from nothing."""
    parents = np.repeat(chain_of(rows), 2, axis=0)
    case = make_case(rows, parents, chain=True)
    out, _, states = recurrence(case, parents)
    with jax.enable_x64(True):
        got = call(case)
        assert furthest(got.out, out) < 1e-12
        last = [rows - 1, rows // 2]
        after = states_after(case, got.delta, parents, last, rows)
        assert furthest(after, states[[0, 1], last]) < 1e-12
        if rows <= 7:
            as_tree = call(replace(case, parents=parents))
            assert furthest(as_tree.out, out) < 1e-12
        nothing = replace(case, state=None)
        zero = replace(case, state=np.zeros_like(case.state))
        got = call(nothing)
        assert furthest(got.out, recurrence(zero, parents)[0]) < 1e-12
        jax.tree.map(
            np.testing.assert_array_equal,
            states_after(nothing, got.delta, parents, last, rows),
            states_after(zero, got.delta, parents, last, rows),
        )
    got = call(case.astype(np.float32))
    assert furthest(got.out, out) < bound_in_float32(case, out)


def test_a_token_alone_has_no_matrix_of_tokens():
    for parents in (None, chain_of(1)):
        case = replace(make_case(0, chain_of(1)), parents=parents).astype(np.float32)
        assert "triangular_solve" not in str(jax.make_jaxpr(call)(case))
    assert "triangular_solve" in str(jax.make_jaxpr(call)(make_case(0, chain_of(2)).astype(np.float32)))


def test_every_product_is_of_full_precision():
    """By default a GPU would multiply float32 in TF32."""
    for case in (
        make_case(0, chain_of(8)),
        make_case(0, chain_of(300), chain=True),
        make_case(0, chain_of(1)),
    ):
        products = str(jax.make_jaxpr(call)(case.astype(np.float32))).split("dot_general")[1:]
        assert len(products) > 0
        assert all("HIGHEST" in product[:300] for product in products)


def test_nodes_may_stand_in_any_order():
    rng = np.random.default_rng(11)
    tree = random_tree(rng, 64, 9)
    place, other = shuffled(rng, tree)
    assert (place != np.arange(64)).any()
    case = make_case(1, tree[None]).astype(np.float32)
    order = np.argsort(place)
    moved = Case(tuple(x[:, order] for x in case.tokens), case.state, other[None])
    one, two = call(case), call(moved)
    np.testing.assert_allclose(two.out[:, place], one.out, atol=2 * bound_in_float32(case, one.out))
    for node in (0, 30, 63):
        after = states_after(case, one.delta, case.parents, [node], 12)
        other = states_after(moved, two.delta, moved.parents, [place[node]], 12)
        np.testing.assert_allclose(other, after, atol=2 * bound_in_float32(case, after))


def test_a_count_of_0_changes_no_bit():
    parents = np.repeat(chain_of(6), 3, axis=0)
    case = make_case(0, parents, chain=True).astype(np.float32)
    case.state[1, 0, :2] = [[-0.0], [np.nan]]
    delta = case.tokens[2].copy()
    delta[1] = np.nan
    path = np.array([[0, 1, 2], [-1, 99, 5], [0, 1, -1]], np.int32)
    after = jitted_advance(case.state, case.tokens[1], delta, case.tokens[3], path, np.array([3, 0, 2]))
    assert np.asarray(after)[1].tobytes() == case.state[1].tobytes()
    assert np.isfinite(after[0]).all()
    assert (after[0] != case.state[0]).any()
    nothing = jitted_advance(None, case.tokens[1], delta, case.tokens[3], path, np.array([1, 0, 0]))
    assert not np.asarray(nothing[1:]).any()


BAD = {
    "k": (lambda a: a | {"k": a["k"][:, :2]}, r"k is \(1, 2, 2, 4\), expected \(1, 3, 2, 4\)"),
    "state": (
        lambda a: a | {"state": a["state"][:, :3]},
        r"state is \(1, 3, 4, 5\), expected \(1, 4, 4, 5\)",
    ),
    "heads": (
        lambda a: a | {name: a[name][:, :, :3] for name in ("v", "decay", "beta")} | {"state": None},
        "3 value heads are no multiple of 2 key heads",
    ),
    "parents": (lambda a: a | {"parents": jnp.zeros((1, 3))}, "parents holds float32, expected int32"),
    "large": (
        lambda a: (
            {name: jnp.repeat(x, 100, axis=1) for name, x in a.items() if x is not None and name != "state"}
            | {"parents": jnp.zeros((1, 300), jnp.int32)}
        ),
        "a tree of 300 nodes, at most 256",
    ),
}


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("change", BAD)
def test_bad_arguments(change):
    good = {"q": (1, 3, 2, 4), "k": (1, 3, 2, 4), "v": (1, 3, 4, 5), "decay": (1, 3, 4), "beta": (1, 3, 4)}
    arrays = {name: jnp.zeros(shape) for name, shape in (good | {"state": (1, 4, 4, 5)}).items()}
    spoil, message = BAD[change]
    with pytest.raises(ValueError, match=f"^gated_delta: .*{message}"):
        gated_delta(**spoil(arrays | {"parents": None}))


@pytest.mark.usefixtures("no_type_checks")
def test_bad_arguments_of_advance():
    k, delta, decay = jnp.zeros((2, 3, 2, 4)), jnp.zeros((2, 3, 4, 5)), jnp.zeros((2, 3, 4))
    path, count = jnp.zeros((2, 2), jnp.int32), jnp.zeros(2, jnp.int32)
    with pytest.raises(
        ValueError, match=r"^advance: decay is \(2, 3, 3\).*; count is \(1,\), expected \(2,\)"
    ):
        advance(None, k, delta, decay[:, :, :3], path, count[:1])
    with pytest.raises(ValueError, match=r"^advance: path holds float32, expected int32"):
        advance(None, k, delta, decay, path + 0.5, count)
    with pytest.raises(ValueError, match=r"^advance: 3 value heads are no multiple of 2 key heads"):
        advance(None, k, delta[:, :, :3], decay[:, :, :3], path, count)
    with pytest.raises(ValueError, match=r"^advance: k must be float32 \[B, N, K, D\]"):
        advance(None, k[0], delta, decay, path, count)
