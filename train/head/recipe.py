"""The recipe of a draft head: all settings of its training."""

from dataclasses import dataclass, field
from typing import Literal

from jetspec_jax.config import MAX_SELECTED
from jetspec_jax.config.fields import MAX_SIZE
from jetspec_jax.sampling.params import SamplingParams
from train.data.manifest import CORPUS
from train.loop.fit import Fit, below_least
from train.loop.mesh import MeshSettings
from train.loss.objectives import HARD_LABELS, Objective
from train.loss.selection import SelectionLossName

#: Initial weights of a head: random, copied from the target's layers, or from a head's checkpoint.
Start = Literal["random", "target", "checkpoint"]

#: What to do if the initial head has a selector.
Existing = Literal["refuse", "replace", "continue"]

# The order of the data needs a seed below this.
MOST_SEED = 2**32


@dataclass(frozen=True)
class HeadSettings:
    """The head's config. None is the target's value, or for layers, block size and taps the published heads'.

    For a head that starts from a checkpoint, all other settings must be None.

    Attributes:
        start: The initial weights.
        layers: Decoder layers; None is 5.
        block_size: Draft slots, including the anchor's; None is 16.
        taps: Target layers that the head reads; None spreads as many as the head has layers over the target.
        causal: Whether slot j attends to the slots up to j only; None is true.
        mask_token: Token, or its id, whose embedding fills the slots after the anchor; None is the
            tokenizer's mask token.
        intermediate_size: Features of the feed-forward blocks.
        scaled_embeddings: Whether the head scales embeddings as the target does; None is true.
        capped_logits: Whether the head's logits are capped as the target's are; None is false.
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
class SelectorSettings:
    """A selector to train with a head that starts from a checkpoint.

    Attributes:
        rank: Width of its codebooks.
        candidates: Number of top tokens of a draft row that it rescores.
        tail: Whether probabilities are normalised including a row's other tokens.
        existing: Whether a head with a selector is refused, gets a new selector, or continues the training of
            its selector, which must have this rank, these candidates and this tail.
        joint: Whether the head is trained too, by ``objective``; otherwise its weights do not change.
        loss: The selector's loss.
        temperature: Temperature of the target's distribution, for example that of serving.
        weight: Weight of the selector's loss in the sum with the head's loss, in joint training.
        table_rate: Learning rate of the codebooks' free part, relative to the learning rate; with 0 they stay
            projections of the target's embedding.
    """

    rank: int
    candidates: int = 16
    tail: bool = True
    existing: Existing = "refuse"
    joint: bool = False
    loss: SelectionLossName = "forward_kl"
    temperature: float = 1.0
    weight: float = 1.0
    table_rate: float = 0.1

    def check(self) -> list[str]:
        """Messages about all settings that are out of range."""
        ranges = {"rank": (1, MAX_SIZE), "candidates": (1, MAX_SELECTED)}
        wrong = [
            f"selector.{name} must lie in {least}..{most}, not {getattr(self, name)}"
            for name, (least, most) in ranges.items()
            if not least <= getattr(self, name) <= most
        ]
        wrong += [
            f"selector.{name} must be above 0, not {getattr(self, name)}"
            for name in ("temperature", "weight")
            if getattr(self, name) <= 0
        ]
        wrong += below_least("selector", self, {"table_rate": 0})
        if self.loss == "forward_kl" and not self.tail:
            wrong.append(
                "selector.loss must be candidates_kl or total_variation where selector.tail is false, not "
                "forward_kl, which compares the tails"
            )
        return wrong


@dataclass(frozen=True)
class HeadEvaluation:
    """Evaluations of the head on held-out documents during training.

    Attributes:
        windows: Most windows of the validation loss.
        prompts: Most prompts to decode. With 0 there is no tau, and the validation loss chooses the best
            weights.
        prompt_tokens: Tokens of a prompt, if the document does not begin with a prompt.
        new_tokens: Tokens generated for each prompt.
        budgets: Token-tree budgets.
        temperatures: Sampling temperatures; 0 is greedy. Each budget decodes at each temperature. Tau at the
            first temperature and the largest budget chooses the best weights.
        width: Children per node.
    """

    windows: int = 64
    prompts: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 128
    budgets: tuple[int, ...] = (16, 64)
    temperatures: tuple[float, ...] = (0.0,)
    width: int = 7

    def check(self) -> list[str]:
        """Messages about all settings that are out of range."""
        least = {"windows": 1, "prompts": 0, "prompt_tokens": 1, "new_tokens": 1}
        wrong = below_least("evaluation", self, least)
        if self.prompts and not self.budgets:
            wrong.append("evaluation.budgets must name a budget, or evaluation.prompts be 0")
        if self.prompts or self.temperatures:
            wrong += _wrong_temperatures("evaluation", self.temperatures)
        return wrong


@dataclass(frozen=True)
class Calibration:
    """The texts to which a finished head's draft scales are fitted: the target's answers to held-out prompts.

    Attributes:
        prompts: Most prompts.
        max_tokens: Tokens of an answer.
        temperatures: Temperatures at which each prompt is answered.
    """

    prompts: int = 64
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)

    def check(self) -> list[str]:
        """Messages about all settings that are out of range."""
        wrong = below_least("calibration", self, {"prompts": 1, "max_tokens": 1})
        return wrong + _wrong_temperatures("calibration", self.temperatures)


def _wrong_temperatures(table: str, temperatures: tuple[float, ...]) -> list[str]:
    wrong = []
    if not temperatures:
        wrong.append(f"{table}.temperatures must name a temperature")
    if len(set(temperatures)) < len(temperatures):
        wrong.append(f"{table}.temperatures must differ, not be {list(temperatures)}")
    for temperature in temperatures:
        try:
            SamplingParams(temperature=temperature)
        except ValueError as error:
            wrong.append(f"{table}.temperatures: {error}")
    return wrong


@dataclass(frozen=True)
class HeadRecipe:
    """A training run of a draft head.

    Attributes:
        window: Tokens of a training sequence; longer documents are cut.
        packing: Whether documents share windows; otherwise each document is padded to whole windows.
            Evaluations never pack, so their figures are comparable.
        remat: Whether the backward pass recomputes the head's layers: slower, with less memory.
        deterministic: Whether runs are bitwise reproducible on the same device, at some cost on a GPU.
        dtype: "float32", "bfloat16" or "auto", for the target and the head's forward pass. The head's master
            weights are float32.
        selector: A selector to train with the head; None trains only the head.
        calibration: The last step, which fits the head's draft scales; None leaves them as they are.
        seed: Seed of the initial weights, of the order of the data and of the anchors.
    """

    fit: Fit
    window: int = 2048
    head: HeadSettings = field(default_factory=HeadSettings)
    objective: Objective = field(default_factory=Objective)
    evaluation: HeadEvaluation = field(default_factory=HeadEvaluation)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    packing: bool = False
    remat: bool = False
    deterministic: bool = False
    dtype: str = "auto"
    selector: SelectorSettings | None = None
    calibration: Calibration | None = None
    seed: int = 0

    def check(self) -> None:
        """Raises ValueError that lists all settings that are out of range."""
        objective = self.objective
        wrong = self.fit.check() + self.evaluation.check()
        if self.window < 2:
            wrong.append(f"window must be at least 2, not {self.window}")
        wrong += below_least("objective", objective, {"gamma": 0, "anchors": 1, "chunk": 1})
        if objective.temperature <= 0:
            wrong.append(f"objective.temperature must be above 0, not {objective.temperature}")
        if not 0 <= objective.smoothing < 1:
            wrong.append(f"objective.smoothing must lie in 0..1, 1 excluded, not {objective.smoothing}")
        if objective.loss == "dpace" and objective.gamma:
            wrong.append(
                "objective.gamma must be 0 with the loss dpace, which has weights of its own, not "
                f"{objective.gamma}"
            )
        if self.selector is not None:
            wrong += self._check_selector(self.selector)
        if self.calibration is not None:
            wrong += self.calibration.check()
        if self.dtype == "float16":
            wrong.append("dtype must be auto, float32 or bfloat16: float16 would lose small gradients")
        if not 0 <= self.seed < MOST_SEED:
            wrong.append(f"seed must lie in 0..{MOST_SEED - 1}, not {self.seed}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def risk_of(self, mode: str) -> str:
        """Why documents of this mode may make a head worse; "" if there is no known reason."""
        if (
            mode != CORPUS
            or self.objective.loss not in HARD_LABELS
            or not (self.selector is None or self.selector.joint)
        ):
            return ""
        return (
            f"objective.loss={self.objective.loss} teaches the tokens of these texts (mode corpus), and the "
            "target may write others: unless the texts are its answers, set objective.loss=forward_kl or let "
            "it answer (--mode regenerate)"
        )

    def _check_selector(self, selector: SelectorSettings) -> list[str]:
        wrong = selector.check()
        if self.head.start != "checkpoint":
            wrong.append(f"head.start must be 'checkpoint' with a selector, not {self.head.start!r}")
        if self.mesh.expert * self.mesh.tensor > 1:
            wrong.append(
                "mesh.expert and mesh.tensor must be 1 with a selector, whose training needs the target's "
                f"whole embedding on each device, not {self.mesh.expert} and {self.mesh.tensor}"
            )
        return wrong
