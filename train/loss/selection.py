"""The loss of a selector, which predicts the candidate of a draft row that follows a parent token.

Each row is scored with its true parent, the text's token before it, and compared with the target's row that
predicts the same token. Both distributions are over the row's K candidates and the *tail*, the sum of all
other tokens. Shapes: B sequences, A anchors, D draft depth, N draft rows of a sequence (A times D),
K candidates, M model.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, Key

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, bind
from jetspec_jax.models.selector import Selector
from jetspec_jax.tree import pair_log_probs, top_candidates
from train.loss.distillation import Drafts, batch_counts, by_depth, draft_at_anchors, head_rows, row_weights
from train.loss.objectives import (
    DraftRows,
    Logits,
    Loss,
    Mean,
    Means,
    Objective,
    accepted_length,
    by_chunks,
    depth_weights,
)
from train.loss.precision import whole

#: Forward KL over the candidates and the tail; forward KL of both distributions renormalised over the
#: candidates; total variation over the candidates and the tail.
SelectionLossName = Literal["forward_kl", "candidates_kl", "total_variation"]

# The least probability of a tail, which is the difference of float32 numbers near 1.
_LEAST_TAIL = 1e-6


class Choices(NamedTuple):
    """The candidates of each draft row, with the head's and the target's probabilities.

    Attributes:
        tokens: The row's candidates, by the head's probability, highest first.
        log_q: The head's log-probabilities of the candidates, normalised over the whole vocabulary.
        p: The target's probabilities of the candidates, normalised likewise.
        likeliest: The target's likeliest token.
    """

    tokens: Int32[Array, "B N K"]
    log_q: Float32[Array, "B N K"]
    p: Float32[Array, "B N K"]
    likeliest: Int[Array, "B N"]


def selection_loss(
    head_config: DraftHeadConfig,
    target_config: ModelConfig,
    objective: Objective,
    dtype: jnp.dtype,
    *,
    loss: SelectionLossName,
    temperature: float,
    joint: float | None,
    remat: bool = False,
) -> Loss:
    """The loss of a draft head's selector, with the anchors and depth weights of `distillation_loss`.

    Trees grow by the head's distribution at temperature 1, whatever the sampling temperature, so only the
    target's distribution has a temperature here.

    The means "loss_by_depth", "accuracy_by_depth" and "accepted_length" are with the selector; the means
    ending in "_without" are without it, with all scores 0. "coverage_by_depth" is how often the text's token
    is among the candidates. A joint loss adds "head_loss" and "head_loss_by_depth".

    Sources: teacher forcing and the tail from DFlash 2's candidate selector; the loss over candidates only
    from UBTree; total variation as in `draft_losses`.

    Args:
        target_config: The target, whose weights are the loss's ``frozen`` argument; no devices share it.
        temperature: Temperature of the target's distribution.
        joint: Weight of the selector's loss in the sum with the head's loss; None for a frozen head.
    """
    selector_config = head_config.selector
    assert selector_config is not None, "a head without a selector"
    tail = selector_config.tail

    def computed(weights: Weights, frozen: Weights, batch: dict[str, Array], key: Key[Array, ""]) -> Means:
        drafts = draft_at_anchors(
            head_config, target_config, weights, frozen, batch, key, objective.anchors, dtype, remat=remat
        )
        if drafts.teacher.split:
            raise ValueError("a selector's loss needs a target that is not sharded")
        task, (b, a, d) = drafts.task, drafts.task.rows.shape
        choices = choices_of(
            drafts, head_config, selector_config.candidates, temperature, chunk=objective.chunk
        )
        selector = bind(head_config, whole(weights)).selector
        scores = score_below(selector, drafts, batch["tokens"], choices.tokens)

        def rows(scores: Float[Array, "B N K"]) -> DraftRows:
            rows = selected_rows(choices, scores, loss=loss, tail=tail)
            return DraftRows(*(x.reshape(b, a, d) for x in rows))

        selected, without = rows(scores), rows(jnp.zeros_like(scores))
        covered = jnp.any(choices.tokens == task.labels.reshape(b, a * d)[:, :, None], axis=-1)
        value, head_means = selected.loss, {}
        if joint is None:
            # D-PACE needs the head's loss, which is not computed here.
            weight = task.learn.astype(jnp.float32) * depth_weights(d, objective.gamma)[None, None, :]
        else:
            head = head_rows(drafts, head_config, objective)
            weight = row_weights(head.loss, task.learn, objective)
            value = head.loss + joint * selected.loss
            head_means = {
                "head_loss": Mean(jnp.sum(weight * head.loss), jnp.sum(weight)),
                "head_loss_by_depth": by_depth(head.loss, task.learn),
            }
        return {
            "loss": Mean(jnp.sum(weight * value), jnp.sum(weight)),
            "loss_by_depth": by_depth(selected.loss, task.learn),
            "loss_by_depth_without": by_depth(without.loss, task.learn),
            "accuracy_by_depth": by_depth(selected.matches, task.learn),
            "accuracy_by_depth_without": by_depth(without.matches, task.learn),
            "coverage_by_depth": by_depth(covered.reshape(b, a, d), task.learn),
            "accepted_length": accepted_length(selected.matches, task.learn),
            "accepted_length_without": accepted_length(without.matches, task.learn),
            **head_means,
            **batch_counts(drafts, batch),
        }

    return computed


def choices_of(
    drafts: Drafts, head_config: DraftHeadConfig, count: int, temperature: float, *, chunk: int
) -> Choices:
    """The ``count`` candidates of all draft rows; logits are computed and dropped chunk by chunk."""
    b, a, d = drafts.task.rows.shape
    states = jnp.take_along_axis(drafts.hidden, drafts.task.rows.reshape(b, a * d)[:, :, None], axis=1)

    def chosen(
        logits: Logits, draft_logits: Logits, student: Array, states: Array
    ) -> tuple[Array, Array, Array, Array]:
        def part(student: Array, states: Array) -> tuple[Array, Array, Array, Array]:
            drafted = top_candidates(draft_logits(student), count)
            given = jax.lax.stop_gradient(logits(states)).astype(jnp.float32) / temperature
            p = jnp.take_along_axis(jax.nn.softmax(given, axis=-1), drafted.tokens, axis=2)
            return drafted.tokens, drafted.log_probs, p, jnp.argmax(given, axis=-1)

        # In joint training the backward pass recomputes the logits; a frozen head has no backward pass.
        return by_chunks(jax.checkpoint(part), (student, states), chunk)

    student = drafts.student.reshape(b, a * d, -1)
    return Choices(*drafts.teacher.read(chosen, student, states, capped=head_config.capped_logits))


def score_below(
    selector: Selector, drafts: Drafts, tokens: Int[Array, "B T"], candidates: Int32[Array, "B N K"]
) -> Float32[Array, "B N K"]:
    """The selector's scores of candidates, with the text's token before each draft row as parent."""
    b, a, d = drafts.task.rows.shape
    # The target's row that predicts a token is at the token before it.
    parents = jnp.take_along_axis(tokens, drafts.task.rows.reshape(b, a * d), axis=1)
    student = drafts.student.reshape(b, a * d, -1)
    return selector(student, parents[:, :, None], candidates)[:, :, 0]


def selected_rows(
    choices: Choices, scores: Float32[Array, "B N K"], *, loss: SelectionLossName, tail: bool
) -> DraftRows:
    """The loss of each row, ``[B, N]``, under scores of its candidates.

    With p the target's distribution, q the head's with the scores, and t the tail: forward KL is
    ``sum over K of p log(p / q) + p_t log(p_t / q_t)``, total variation ``(sum over K of |p - q|
    + |p_t - q_t|) / 2``. Renormalised, p and q are divided by what they give all candidates
    together. Without ``tail`` q_t is 0.
    """
    log_q = pair_log_probs(choices.log_q, scores[:, :, None], tail=tail)[:, :, 0]
    best = jnp.take_along_axis(choices.tokens, jnp.argmax(log_q, axis=-1)[:, :, None], axis=2)[:, :, 0]
    matches = best == choices.likeliest
    p = choices.p
    if loss == "candidates_kl":
        return DraftRows(_divergence(jax.nn.log_softmax(_log(p)), jax.nn.log_softmax(log_q)), matches)
    p_tail = jnp.maximum(1 - jnp.sum(p, axis=-1), 0.0)
    if loss == "total_variation":
        q = jnp.exp(log_q)
        q_tail = jnp.maximum(1 - jnp.sum(q, axis=-1), 0.0)
        return DraftRows((jnp.sum(jnp.abs(p - q), axis=-1) + jnp.abs(p_tail - q_tail)) / 2, matches)
    # The normaliser of the candidates applies to the tail's log-probability, too.
    normaliser = choices.log_q[:, :, 0] + scores[:, :, 0] - log_q[:, :, 0]
    rest = jnp.maximum(1 - jnp.sum(jnp.exp(choices.log_q), axis=-1), _LEAST_TAIL)
    log_q = jnp.concatenate([log_q, (jnp.log(rest) - normaliser)[:, :, None]], axis=-1)
    p = jnp.concatenate([p, p_tail[:, :, None]], axis=-1)
    return DraftRows(_divergence(_log(p), log_q), matches)


def _log(p: Float32[Array, "*s"]) -> Float32[Array, "*s"]:
    """A finite logarithm of probabilities."""
    return jnp.log(jnp.maximum(p, jnp.finfo(jnp.float32).tiny))


def _divergence(log_p: Float32[Array, "B N X"], log_q: Float32[Array, "B N X"]) -> Float32[Array, "B N"]:
    """``sum of p log(p / q)``."""
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
