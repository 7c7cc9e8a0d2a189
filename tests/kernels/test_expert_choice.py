"""expert_choice against each family's rule in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_choice import ExpertChoice, RouterRule, api, expert_choice, pallas_triton
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

RULES = {
    "qwen": (RouterRule(8, renormalise=False), False, False),
    "gemma": (RouterRule(8), False, True),
    "gpt_oss": (RouterRule(4), False, False),
    "step": (RouterRule(8, scores="sigmoid", scale=3.0), True, False),
    "sigmoid": (RouterRule(2, scores="sigmoid", renormalise=False), False, True),
    "one": (RouterRule(1), False, False),
}


def make_case(tokens, num_experts):
    rng = np.random.default_rng(tokens)
    logits = rng.normal(0, 2, (tokens, num_experts)).astype(np.float32)
    return (
        logits,
        rng.normal(0, 0.3, num_experts).astype(np.float32),
        rng.random(num_experts, np.float32) + 0.5,
    )


def oracle(logits, routing, bias, expert_scale):
    logits = logits.astype(np.float64)
    if routing.scores == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    order = logits if routing.scores == "softmax" else scores + (0 if bias is None else bias)
    experts = np.argsort(-order, axis=1, kind="stable")[:, : routing.top_k]
    weights = np.take_along_axis(scores, experts, axis=1)
    if routing.renormalise:
        weights /= weights.sum(axis=1, keepdims=True)
    weights *= routing.scale
    return experts, weights if expert_scale is None else weights * expert_scale[experts]


class ExpertChoiceSuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls):
        run = partial(expert_choice, implementation=cls.implementation)
        return jax.jit(run, static_argnames="routing")

    def run(self, logits, routing, bias=None, expert_scale=None):
        choice = self.jitted()(logits, routing=routing, bias=bias, expert_scale=expert_scale)
        assert isinstance(choice, ExpertChoice)
        assert choice.experts.dtype == np.int32
        assert choice.weights.dtype == np.float32
        return np.asarray(choice.experts), np.asarray(choice.weights)

    @pytest.mark.parametrize(
        ("size", "rule"),
        [
            *(((16, 32), rule) for rule in RULES),
            *(((5, 288), rule) for rule in ("gpt_oss", "step")),
            wide((1, 128), "sigmoid"),
            wide((3, 8), "qwen"),
        ],
    )
    def test_oracle(self, size, rule):
        routing, biased, scaled = RULES[rule]
        logits, bias, expert_scale = make_case(*size)
        bias, expert_scale = bias if biased else None, expert_scale if scaled else None
        experts, weights = self.run(logits, routing, bias, expert_scale)
        right_experts, right_weights = oracle(logits, routing, bias, expert_scale)
        np.testing.assert_array_equal(experts, right_experts)
        np.testing.assert_allclose(weights, right_weights, rtol=3e-6)

    @pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
    def test_ties(self, scores):
        """The lower index first: if all tie, if the last place is tied, and among impossible experts."""
        logits = np.zeros((4, 32), np.float32)
        logits[1, [3, 9, 20]] = 1, 2, 1
        logits[2] = -np.inf
        logits[2, [30, 31]] = -1, 0
        logits[3] = np.repeat(np.arange(8), 4)
        experts, weights = self.run(logits, RouterRule(4, scores=scores))
        expected = [[0, 1, 2, 3], [9, 3, 20, 0], [31, 30, 0, 1], [28, 29, 30, 31]]
        np.testing.assert_array_equal(experts, expected)
        np.testing.assert_array_equal(experts, jax.lax.top_k(logits, 4)[1])
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        assert (weights[2, 2:] == 0).all()

    def test_large_logits(self):
        logits = np.asarray([[1e4, -1e4, 1e4 - 1, 0], [-1e4, -1e4 - 1, -2e4, -3e4]], np.float32)
        _, weights = self.run(logits, RouterRule(2))
        np.testing.assert_allclose(weights, [[0.731059, 0.268941]] * 2, rtol=1e-5)
        experts, weights = self.run(logits, RouterRule(2, scores="sigmoid"))
        np.testing.assert_array_equal(experts, [[0, 2], [0, 1]])
        np.testing.assert_allclose(weights, [[0.5, 0.5], [0, 0]], atol=1e-7)

    def test_all_experts(self):
        logits, _, _ = make_case(3, 8)
        experts, _ = self.run(logits, RouterRule(8))
        np.testing.assert_array_equal(np.sort(experts, axis=1), np.tile(np.arange(8), (3, 1)))

    @pytest.mark.parametrize("rule", ["step", "gemma"])
    def test_narrow_biases_and_scales_are_widened(self, rule):
        routing, biased, scaled = RULES[rule]
        logits, *narrow = make_case(16, 32)
        narrow = [
            jnp.asarray(own, jnp.bfloat16) if wanted else None
            for own, wanted in zip(narrow, (biased, scaled), strict=True)
        ]
        wide = [None if own is None else own.astype(jnp.float32) for own in narrow]
        for found, expected in zip(
            self.run(logits, routing, *narrow), self.run(logits, routing, *wide), strict=True
        ):
            np.testing.assert_array_equal(found, expected)

    def test_second_call_has_the_same_bits(self):
        logits, bias, _ = make_case(16, 32)
        first, second = (self.run(logits, RULES["step"][0], bias)[1] for _ in range(2))
        np.testing.assert_array_equal(first, second)


class TestXla(ExpertChoiceSuite):
    implementation = "xla"


class TestPallasTritonInterpreted(ExpertChoiceSuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        stand_in(api, partial(pallas_triton.expert_choice, interpret=True))


@pytest.mark.parametrize("rule", ["gemma", "step"])
def test_lowers_for_cuda(rule):
    routing, biased, scaled = RULES[rule]
    experts = jax.ShapeDtypeStruct((288,), jnp.bfloat16)
    bias, expert_scale = experts if biased else None, experts if scaled else None
    run = partial(pallas_triton.expert_choice, routing=routing)
    lowered = lower_for_gpu(run, jax.ShapeDtypeStruct((64, 288), jnp.float32), bias, expert_scale)
    assert lowered.count(KERNEL) == 1


def test_unsupported_shape():
    assert pallas_triton.unsupported(jnp.zeros((2, 4096))) is None
    assert pallas_triton.unsupported(jnp.zeros((2, 4097))) == "4097 experts are more than 4096"


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                {"logits": jnp.zeros((3, 8), jnp.bfloat16)},
                r"logits must be float32 .*, got bfloat16 \(3, 8\)",
            ),
            ({"bias": jnp.zeros(7)}, r"bias is \(7,\), expected \(8,\)"),
            ({"routing": RouterRule(9)}, "9 experts are wanted of 8"),
            (
                {"bias": jnp.zeros(8), "routing": RouterRule(2)},
                "a bias is for sigmoid scores, not for softmax",
            ),
        ],
    )
    def test_arrays(self, call, message):
        call = {"logits": jnp.zeros((3, 8)), "routing": RouterRule(2, scores="sigmoid")} | call
        with pytest.raises(ValueError, match=f"expert_choice: {message}"):
            expert_choice(call.pop("logits"), **call)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [({"top_k": 0}, "top_k must be at least 1, not 0"), ({"top_k": 2, "scores": "tanh"}, "not 'tanh'")],
    )
    def test_rules(self, settings, message):
        with pytest.raises(ValueError, match=f"RouterRule: .*{message}"):
            RouterRule(**settings)
