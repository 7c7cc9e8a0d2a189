"""The shapes people run, one registry for tests and benchmarks."""

from dataclasses import dataclass

from pallas_kernels.activation import GELU_TANH, SILU, Activation
from pallas_kernels.expert_choice import RouterRule


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of one layer of a model, and how its router chooses among them.

    `tokens` are the rows of a call: plain decoding and the tree buckets.
    """

    name: str
    experts: int  # E
    size: int  # M
    features: int  # I
    routing: RouterRule
    activation: Activation = SILU
    biases: bool = False  # of both products
    choice_bias: bool = False
    expert_scale: bool = False
    tokens: tuple[int, ...] = (1, 16, 64, 128, 256)


SHAPES = (
    ExpertShape("qwen3-30b-a3b", 128, 2048, 768, RouterRule(8)),
    ExpertShape("gpt-oss-20b", 32, 2880, 2880, RouterRule(4), Activation.gpt_oss(), biases=True),
    ExpertShape("gemma4-26b-a4b", 128, 2816, 704, RouterRule(8), GELU_TANH, expert_scale=True),
    ExpertShape("qwen3.6-35b-a3b", 256, 2048, 512, RouterRule(8)),
    ExpertShape(
        "step-3.7-flash",
        288,
        4096,
        1280,
        RouterRule(8, scores="sigmoid", scale=3.0),
        Activation.step(7.0),
        choice_bias=True,
    ),
)
