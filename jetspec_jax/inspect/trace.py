"""Decodes one request and returns each round's candidates, tree, choices and accepted path.

For people who want to see a tree, and for measurements. The parts of a round are those of `TreeDecoder`, in a
program that also returns the values between the parts.
"""

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, Int, Int32

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.loop import jit_rounds
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.round import Accepted
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, pick, put
from jetspec_jax.device.mesh import without_mesh
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.admission import check_models, check_single, make_requests
from jetspec_jax.engine.batch import Kind
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.engines import Engines
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.engine.prompts import Prompt
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.runner import decoder_for
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import NO_PARENT, ROOT_INDEX, Auto, Candidates, Hints, TokenTree, algorithm_of
from pallas_kernels import shards


class RoundTrace(NamedTuple):
    """One round of one request, as NumPy values: N nodes of the tree, A accepted, K candidates.

    Attributes:
        start: Position of the anchor in the sequence, and number of committed tokens before it.
        candidate_tokens: The best draft tokens of every row, by `candidate_scores`; row d is for depth d + 1.
        candidate_log_probs: Their log-probabilities under the head.
        candidate_scores: Their log-probabilities of being the target's choice, given the request's noise:
            trees grow by these. At temperature 0, without `draft_scales`, they are those under the head.
        tokens: The tree's tokens; node 0 is the anchor.
        parents: Index of each node's parent; -1 for the anchor.
        depths: Distance from the anchor.
        scores: Cumulative log-probability under the head; the anchor's is 0.
        tree_scores: Cumulative scores, by which the tree grew.
        target_log_probs: Log-probability of each node's token under the target after the node's parent, at
            temperature 1 and without a filter; the anchor's is 0.
        choices: The target's choice after each node, sampled or greedy as the request asks.
        path: The accepted nodes, the anchor first.
        committed: The round's tokens: the choices along the path; the last is the bonus. Tokens after a stop
            or after ``max_tokens`` are included here, but not in the completion.
        pair_log_probs: Log-probabilities of the candidates below each candidate of the row above, under the
            head's selector; see `Candidates`. None without a selector.
        pair_scores: Likewise the scores of pairs.
    """

    start: int
    candidate_tokens: Int32[np.ndarray, "D K"]
    candidate_log_probs: Float32[np.ndarray, "D K"]
    candidate_scores: Float32[np.ndarray, "D K"]
    tokens: Int32[np.ndarray, "N"]
    parents: Int32[np.ndarray, "N"]
    depths: Int32[np.ndarray, "N"]
    scores: Float32[np.ndarray, "N"]
    tree_scores: Float32[np.ndarray, "N"]
    target_log_probs: Float32[np.ndarray, "N"]
    choices: Int32[np.ndarray, "N"]
    path: Int32[np.ndarray, "A"]
    committed: Int32[np.ndarray, "A"]
    pair_log_probs: Float32[np.ndarray, "D K K"] | None = None
    pair_scores: Float32[np.ndarray, "D K K"] | None = None


class Trace(Iterator[RoundTrace]):
    """The rounds of one request, decoded on demand; its slot is freed when it is closed or dropped.

    Attributes:
        text: The final text of the rounds so far; empty without a tokenizer.
        completion: The whole completion once the request has ended, None before.
    """

    _engine: Engine | None = None

    def __init__(self, engines: Engines, request: Request, tokenizer: Any, *, owns: bool = False):
        """Submits a request; its rounds run between those of other requests; ``owns`` closes the engines."""
        self.text = ""
        self.completion: Completion | None = None
        self._output, self._seen = Output(request, tokenizer), deque[_Seen]()
        buckets = sorted(decoder.bucket for decoder in engines.plan.decoders)
        request.traced = next(bucket for bucket in buckets if bucket >= min(request.budget, buckets[-1]))
        self._owned = engines if owns else None
        [self._engine] = engines.submit([request])

    def __next__(self) -> RoundTrace:
        output, request, engine = self._output, self._output.request, self._engine
        while engine is not None and self.completion is None and not request.cancelled:
            engine.run(functools.partial(self._turn, engine), functools.partial(_is_placed, request))
            output.update()
            if not self._seen:
                continue
            passed = jax.device_get(self._seen.popleft())
            if passed.accepted.counts[0]:  # 0 while it waits for a page
                self.text = output.settled_text
                if output.finish_reason is not None:
                    self.completion = output.completion()
                return _of_one(passed)
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the request; frees its engine if the trace owns it."""
        self._leave()
        if self._owned is not None:
            self._owned.close()

    def __del__(self) -> None:
        if hasattr(self, "_output"):  # else an exception came before its request was made
            self._leave()  # engines that it owned end by themselves

    def _leave(self) -> None:
        """Frees the slot; waits for nothing, so that a finaliser can call it in any thread."""
        self._output.request.cancel()
        if self._engine is not None:
            self._engine.wake()

    def _turn(self, engine: Engine) -> None:
        request = self._output.request
        if request.open:
            engine.trace(request, functools.partial(self._decode, engine))

    def _decode(
        self, engine: Engine, weights: DecodeWeights, state: DecodeState, _: np.int32, *live: Any
    ) -> tuple[DecodeState, RoundRecord]:
        request = self._output.request
        decoder = decoder_for(engine.runner.decoders[request.traced], Kind.of(request.params))
        kept = state.adjust
        if not decoder.adjusts:
            state = replace(state, adjust=None)
        traced_round = jit_rounds(_traced_round, decoder.bucket, decoder.mesh)
        state, (record, passed) = traced_round(decoder, weights, state, *live)
        self._seen.append(passed)
        state = state if decoder.adjusts else replace(state, adjust=kept)
        return state, jax.tree.map(lambda one: one[None], record)


def _is_placed(request: Request) -> bool:
    """Whether a request decodes, or needs no slot any more."""
    return not request.open or request.state is State.DECODING


def trace_request(
    engines: Engines, settings: TreeSettings, prompt: Prompt, params: SamplingParams | None = None
) -> Trace:
    """As `trace_rounds`, in a slot of existing engines; other requests are served between the rounds."""
    target = engines.target
    _check_traced(target, params)
    [request] = make_requests(target, engines.plan, settings, [prompt], params)
    return Trace(engines, request, target.tokenizer)


@without_mesh
def trace_rounds(
    target: Target,
    head: Head | None,
    prompt: Prompt,
    params: SamplingParams | None = None,
    settings: TreeSettings = PLAIN,
    *,
    routing: Hints | None = None,
    proposer: Proposer | None = None,
    proposer_weights: object = None,
    implementation: str | None = None,
) -> Trace:
    """Decodes one request and yields a trace of each round.

    The tokens are those of `generate_tree` with the same seed. The first round's anchor is the prompt's last
    token.

    Args:
        target: The target.
        head: A draft head made for it; None decodes plainly unless a proposer is given.
        prompt: The prompt, in any form that `jetspec_jax.generate` takes.
        params: Sampling parameters and stop conditions.
        settings: The tree settings.
        routing: Routing hints, for algorithms that use them.
        proposer: A proposer other than the head's.
        proposer_weights: That proposer's parameters.
        implementation: Tree attention implementation; None picks the best.

    Raises:
        ValueError: The head does not fit, a setting is out of its range, or the request cannot be served;
            raised by the call, before any round.
        DeviceMemoryError: The device cannot hold the stores and a round's workspace.
    """
    check_models(target, head)
    if head is not None:
        head.check_finite()
    _check_traced(target, params)
    algorithm = algorithm_of(settings.algorithm)
    if isinstance(algorithm, Auto):  # a trace chooses no budgets
        settings = replace(settings, algorithm=algorithm.shape)
    plan = plan_engine(
        target.config,
        None if head is None else head.config,
        settings,
        target.dtype,
        slots=1,
        proposer=proposer,
        implementation=implementation,
        mesh=target.mesh,
    )
    [request] = make_requests(target, plan, settings, [prompt], params, routing)
    engines = Engines(target, head, plan, longer_slots=True, proposer_weights=proposer_weights)
    return Trace(engines, request, target.tokenizer, owns=True)


def _check_traced(target: Target, params: SamplingParams | None) -> None:
    if params is not None and params.structured_outputs is not None:
        raise ValueError("structured_outputs cannot be traced: a traced round is one program")
    if spans(target.mesh):
        raise ValueError("several processes share the target: trace in one process, on its own devices")
    check_single(params)


class _Seen(NamedTuple):
    """Values between the parts of a round, of all slots."""

    starts: Int[Array, "B"]
    candidates: Candidates
    tree: TokenTree
    target_log_probs: Float[Array, "B N"]
    accepted: Accepted


def _traced_round(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, live: Int[Array, "L"] | None = None
) -> tuple[DecodeState, tuple[RoundRecord, _Seen]]:
    """`TreeDecoder.round` of one slot, which also returns the values between its parts.

    The slot is active in this round alone, so that no other round decodes it.
    """

    def run(
        weights: DecodeWeights, state: DecodeState, *live: Int[Array, "L"]
    ) -> tuple[DecodeState, tuple[RoundRecord, _Seen]]:
        picked = pick(state, live[0]) if live else state
        picked = replace(picked, active=jnp.ones_like(picked.active))
        tree, candidates, noise = decoder.propose(weights, picked)
        verified = decoder.verify(weights, picked, tree)
        after, record, accepted = decoder.settle(weights, picked, tree, verified, noise=noise)
        if candidates is None:
            empty = jnp.zeros((picked.anchors.shape[0], 0, decoder.breadth.candidates))
            candidates = Candidates(empty.astype(jnp.int32), empty, empty[:, :, 0])
        log_probs = _target_log_probs(tree, verified.logits)
        seen = _Seen(picked.slots.lengths, candidates, tree, log_probs, accepted)
        after = replace(after, active=jnp.zeros_like(after.active))
        return put(state, live[0], after) if live else after, (record, seen)

    return decoder.on_mesh(run)(weights, state, *(() if live is None else (live,)))


def _target_log_probs(tree: TokenTree, logits: Float[Array, "B N V"]) -> Float32[Array, "B N"]:
    """Log-probability of each node's token under the target's logits at its parent; 0 for the root."""
    values = logits.astype(jnp.float32)
    parents = jnp.maximum(tree.parents, ROOT_INDEX)
    sequence = jnp.arange(parents.shape[0], dtype=jnp.int32)[:, None]
    totals = jax.nn.logsumexp(values, axis=-1)
    if shards.count() == 1:
        log_probs = values[sequence, parents, tree.tokens] - totals[sequence, parents]
    else:
        # Only one shard of the vocabulary has the token's logit; the normaliser needs all shards.
        size = values.shape[-1]
        column = tree.tokens - size * shards.index()
        found = values[sequence, parents, jnp.clip(column, 0, size - 1)]
        found = jnp.where((column >= 0) & (column < size), found, -jnp.inf)
        of_all = shards.gather(jnp.stack([found, totals[sequence, parents]]))
        log_probs = jnp.max(of_all[:, 0], axis=0) - jax.nn.logsumexp(of_all[:, 1], axis=0)
    return jnp.where(tree.parents == NO_PARENT, 0.0, log_probs)


def _of_one(seen: Any) -> RoundTrace:
    """A round of one slot that is on the host, without padding."""
    tree, slot = seen.tree, 0
    nodes, accepted = int(tree.num_nodes[slot]), int(seen.accepted.counts[slot])

    def cut(values: ArrayLike, count: int) -> np.ndarray:
        return np.asarray(values)[slot, :count]

    def of_slot(values: ArrayLike | None) -> Any:
        return None if values is None else np.asarray(values)[slot]

    candidates: Any = seen.candidates
    tokens, scores, pair_scores = map(of_slot, (candidates.tokens, candidates.log_probs, candidates.pairs))
    log_probs, pairs = map(of_slot, (candidates.draft_log_probs, candidates.draft_pairs))
    if log_probs is None or (pairs is None) != (pair_scores is None):  # a proposer that gives scores alone
        log_probs, pairs = scores, pair_scores
    parents, depths = cut(tree.parents, nodes), cut(tree.depths, nodes)
    return RoundTrace(
        start=int(seen.starts[slot]),
        candidate_tokens=tokens,
        candidate_log_probs=log_probs,
        candidate_scores=scores,
        tokens=cut(tree.tokens, nodes),
        parents=parents,
        depths=depths,
        scores=_path_sums(cut(tree.tokens, nodes), parents, depths, tokens, log_probs, pairs),
        tree_scores=cut(tree.scores, nodes),
        target_log_probs=cut(seen.target_log_probs, nodes),
        choices=cut(seen.accepted.choices, nodes),
        path=cut(seen.accepted.path, accepted),
        committed=cut(seen.accepted.tokens, accepted),
        pair_log_probs=pairs,
        pair_scores=pair_scores,
    )


def _path_sums(
    tokens: Int32[np.ndarray, "N"],
    parents: Int32[np.ndarray, "N"],
    depths: Int32[np.ndarray, "N"],
    candidates: Int32[np.ndarray, "D K"],
    log_probs: Float32[np.ndarray, "D K"],
    pairs: Float32[np.ndarray, "D K K"] | None,
) -> Float32[np.ndarray, "N"]:
    """The candidates' log-probabilities, summed along each node's path; parents come before children."""
    places, sums = np.zeros(len(tokens), int), np.zeros(len(tokens), np.float32)
    for node in range(1, len(tokens)):
        row, above = depths[node] - 1, parents[node]
        places[node] = np.argmax(candidates[row] == tokens[node])
        of_row = log_probs[row] if pairs is None else pairs[row, places[above]]
        sums[node] = sums[above] + of_row[places[node]]
    return sums
