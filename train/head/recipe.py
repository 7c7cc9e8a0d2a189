"""The recipe of a draft head: all that its training depends on besides the target and the data."""

from dataclasses import dataclass, field
from typing import Literal

from train.loop.fit import Fit
from train.loop.mesh import MeshShape
from train.loss.objectives import LossName

#: Where a head begins: random numbers, the target's own layers, or a checkpoint of a head.
Start = Literal["random", "target", "checkpoint"]

# What the order of the data takes.
MOST_SEED = 2**32


@dataclass(frozen=True)
class HeadShape:
    """What the head is. None is the target's own value, or for taps and layers the published heads'.

    A head that begins as a checkpoint is what that is: all else here stays unset then.

    Attributes:
        start: Where it begins.
        layers: Decoder layers; None is 5.
        block_size: Draft slots, the anchor's included; None is 16.
        taps: Target layers that it reads; None spreads as many as it has layers over the target.
        causal: Whether slot j sees the slots up to j only; None is true.
        mask_token: Token, or its id, whose embedding fills the slots after the anchor; None is the
            tokenizer's own mask token.
        intermediate_size: Of the feed-forward blocks.
        scaled_embeddings: Whether it sees the target's embeddings as the target scales them; None is true.
        capped_logits: Whether its logits are capped as the target's are, which must be; None is false.
    """

    start: Start = "random"
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    causal: bool | None = None
    mask_token: str | int | None = None
    intermediate_size: int | None = None
    scaled_embeddings: bool | None = None
    capped_logits: bool | None = None


@dataclass(frozen=True)
class Objective:
    """What the head learns, and from which blocks.

    Attributes:
        loss: "forward_kl", "reverse_kl" or "sft".
        temperature: Of the distillation.
        gamma: Weights fall as exp(-depth / gamma); 0 is uniform.
        anchors: Blocks per sequence and step.
        chunk: Draft rows of a sequence whose logits exist at a time.
    """

    loss: LossName = "forward_kl"
    temperature: float = 1.0
    gamma: float = 0.0
    anchors: int = 512
    chunk: int = 1024


@dataclass(frozen=True)
class HeadEvaluation:
    """How the head is measured while it is trained: on held-out documents of the data.

    Attributes:
        windows: Held-out windows of the validation loss, at most.
        prompts: Held-out prompts that the current head decodes, at most; 0 leaves tau out, and the validation
            loss then decides which weights are best.
        prompt_tokens: Tokens of a prompt, where the document does not begin with a prompt of its own.
        new_tokens: Tokens generated for each, greedily.
        budgets: Token-tree budgets; the tau of the largest decides.
        width: Children per node.
    """

    windows: int = 64
    prompts: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 128
    budgets: tuple[int, ...] = (16, 64)
    width: int = 7


@dataclass(frozen=True)
class HeadRecipe:
    """A training run of a draft head.

    Attributes:
        window: Tokens of a training sequence; longer documents are cut.
        remat: Whether the backward pass computes the head's layers again: slower, and less memory.
        deterministic: Whether a run gives the same bits again on the same device, at some cost on a GPU.
        dtype: "float32", "bfloat16" or "auto": of the target and of the head's forward pass. The head's
            master weights are float32.
        seed: Of the head's first weights, of the order of the data and of the anchors.
    """

    fit: Fit
    window: int = 2048
    head: HeadShape = field(default_factory=HeadShape)
    objective: Objective = field(default_factory=Objective)
    evaluation: HeadEvaluation = field(default_factory=HeadEvaluation)
    mesh: MeshShape = field(default_factory=MeshShape)
    remat: bool = False
    deterministic: bool = False
    dtype: str = "auto"
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError naming all settings out of their ranges."""
        objective, look = self.objective, self.evaluation
        least = {
            "window": (self.window, 2),
            "objective.gamma": (objective.gamma, 0),
            "objective.anchors": (objective.anchors, 1),
            "objective.chunk": (objective.chunk, 1),
            "evaluation.windows": (look.windows, 1),
            "evaluation.prompts": (look.prompts, 0),
            "evaluation.prompt_tokens": (look.prompt_tokens, 1),
            "evaluation.new_tokens": (look.new_tokens, 1),
        }
        wrong = self.fit.check() + [
            f"{name} must be at least {to}, not {value}" for name, (value, to) in least.items() if value < to
        ]
        if objective.temperature <= 0:
            wrong.append(f"objective.temperature must be above 0, not {objective.temperature}")
        if look.prompts and not look.budgets:
            wrong.append("evaluation.budgets must name a budget, or evaluation.prompts be 0")
        if not 0 <= self.seed < MOST_SEED:
            wrong.append(f"seed must lie in 0..{MOST_SEED - 1}, not {self.seed}")
        if wrong:
            raise ValueError("; ".join(wrong))
