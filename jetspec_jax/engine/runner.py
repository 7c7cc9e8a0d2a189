"""The runner: launches batches on the device, and later collects their results, in order."""

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.logprobs import Logprobs
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.proposer import warn_of_nan
from jetspec_jax.decode.scoring import lower_scoring, score_prompt, scored_pages
from jetspec_jax.decode.snapshots import keep, restore
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, SlotSettings
from jetspec_jax.decode.three_programs import compile_all
from jetspec_jax.device.mesh import WHOLE, abstract
from jetspec_jax.device.processes import spans, together
from jetspec_jax.engine.batch import (
    KINDS,
    PREFILL,
    SCORES,
    Admission,
    Batch,
    BatchResult,
    Chunk,
    Growth,
    Kind,
    Program,
    SlotCopy,
)
from jetspec_jax.engine.compiler import TRACING, Compiler
from jetspec_jax.engine.grammars import run_constrained
from jetspec_jax.engine.plan import EnginePlan, empty_snapshots, empty_state
from jetspec_jax.engine.size import compile_order
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.sampling.grammar import Matcher

#: Most rounds of a dispatch with log-probabilities: its records are large, and fetched whole.
LOGPROBS_ROUNDS = 32
#: Runs rounds, as `TreeDecoder.decode` does: weights, state (donated), most rounds, and the live slots unless
#: these are all.
Decode = Callable[..., tuple[DecodeState, RoundRecord]]


class Flight(NamedTuple):
    """A launched batch."""

    batch: Batch
    records: RoundRecord | None  # of its rounds, on the device
    started: float | None  # when its launch began, by `time.perf_counter`; None if it is not timed
    last: jax.Array | None  # without rounds, an array to wait for, which no launch donates


class Lowering:
    """Compiles an engine's programs for shapes and placements alone, without its arrays.

    JAX keeps what it compiles so, and a later call with arrays of these shapes and placements uses it. No
    arrays are kept, so that a thread that compiles keeps no stores and no weights alive.
    """

    def __init__(
        self,
        decoders: Mapping[int, TreeDecoder],
        weights: DecodeWeights,
        state: DecodeState,
        dtype: jnp.dtype,
    ):
        self._dtype, self._decoders = dtype, dict(decoders)
        self._models = next(iter(decoders.values())).models
        self._weights: DecodeWeights = jax.tree.map(abstract, weights)
        self._state: DecodeState = jax.tree.map(abstract, state)

    def compile(self, program: Program) -> None:
        """Compiles a program; may be called in several threads at once."""
        kind = KINDS.get(program.kind, Kind())
        all_live = program.slots == self._state.active.shape[0]
        live = () if all_live else (jax.ShapeDtypeStruct((program.slots,), jnp.int32),)
        state = self._state
        if kind.adjusts:
            # As `TreeDecoder.adjustments` makes them.
            slots, vocab, mesh = len(state.active), self._models.target.vocab_size, self._models.mesh
            where = None if mesh is None else NamedSharding(mesh, WHOLE)
            arrays = jax.eval_shape(lambda: Adjustments.empty(slots, vocab))
            adjust = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arrays)
            state = replace(state, adjust=adjust)
        rounds = self._weights, state, *live
        if kind.masked:
            compile_all(decoder_for(self._decoders[program.size], kind), *rounds, tracing=TRACING)
            return
        with TRACING:
            if program.kind == PREFILL:
                rows = jax.ShapeDtypeStruct
                each, ready = rows((program.slots,), jnp.int32), rows((program.slots,), jnp.bool_)
                chunk = each, rows(program[1:], jnp.int32), each, ready
                lowered = prefill.lower(self._models, self._weights, self._state, *chunk)
            elif program.kind == SCORES:
                target = self._models.alone, self._weights.target
                lowered = lower_scoring(*target, program.size, self._dtype)
            else:
                lowered = decoder_for(self._decoders[program.size], kind).lower(*rounds)
        lowered.compile()


def decoder_for(decoder: TreeDecoder, kind: Kind) -> TreeDecoder:
    """The decoder with the optional parts of rounds of a kind."""
    most = min(decoder.max_rounds, LOGPROBS_ROUNDS) if kind.logprobs else decoder.max_rounds
    return replace(decoder, adjusts=kind.adjusts, logprobs=kind.logprobs, max_rounds=most)


class Runner:
    """The device state of all slots, and its programs.

    Each launch donates the state, and keeps the one that it returns. So the device runs launches in order,
    and none needs the results of the one before on the host.
    """

    def __init__(self, plan: EnginePlan, weights: DecodeWeights, *, overlapped: bool = False):
        """Allocates the stores.

        If ``overlapped``, every program is one round, and its launch waits for nothing; else programs are
        loops. Rounds under grammars are the same in both.
        """
        decoder = plan.decoders[-1]
        if decoder.proposer is None:
            weights = weights._replace(proposer=None)
        elif overlapped and decoder.mesh is None:  # loops do this once for all their rounds
            weights = weights._replace(proposer=decoder.proposer.prepare(weights.proposer))
        most = 1 if overlapped else decoder.max_rounds
        #: Decoders by bucket.
        self.decoders = {each.bucket: replace(each, max_rounds=most) for each in plan.decoders}
        self.decoder, self.overlapped = self.decoders[decoder.bucket], overlapped
        self.weights, self.size = weights, plan.size
        self._dtype = plan.dtype
        # Releasing a free slot changes nothing, and compiles the program before the first request ends.
        self.state = self.decoder.release(empty_state(plan), np.int32(0))
        self._grow(())  # likewise
        jnp.copy(self.state.active)  # likewise
        self.snapshots = empty_snapshots(plan)
        if plan.size.snapshots:
            self._copy([SlotCopy(0, 0, 0, restores=False), SlotCopy(0, 0, 0, restores=True)])  # likewise
        #: The batches in flight, in order.
        self.in_flight: deque[Flight] = deque()
        # The prompt that was scored last, and its log-probabilities.
        self._scored: tuple[bytes, Any] = (b"", None)
        self._collected = 0.0  # when the last batch was, by `time.perf_counter`
        # Programs that have been called.
        self._called: set[Program] = set()
        lowering = Lowering(self.decoders, weights, self.state, plan.dtype)
        # Processes that share devices compile alike, so all programs in one order.
        self.compiler = Compiler(lowering.compile, 0 if spans(decoder.mesh) else None)
        weakref.finalize(self, self.compiler.stop).atexit = False

    def launch(
        self, batch: Batch, decode: Decode | None = None, *, matchers: Mapping[int, Matcher] | None = None
    ) -> None:
        """Launches a batch; `collect` waits for it.

        The rounds are run by ``decode``, by default that of the bucket's decoder. With grammar ``matchers``,
        by slot, this waits for all rounds but the last.
        """
        bucket = batch.bucket if batch.rounds else self.decoder.bucket
        decoder = decoder_for(self.decoders[bucket], batch.kind)
        programs = {Program(PREFILL, *shape) for shape in batch.forwards}
        if batch.rounds and decode is None:
            programs.add(Program(str(batch.kind), len(batch.live), batch.bucket))
        self.compiler.compile(sorted(programs))
        # Batches that wait for the compiler or for the host are not timed.
        timed = programs <= self._called and not (batch.copies or matchers or decode)
        self._called |= programs
        for slot in batch.releases:
            self.state = decoder.release(self.state, np.int32(slot))
        for admission in batch.admissions:
            self._admit(admission)
        started = time.perf_counter() if timed else None
        if batch.growths:
            self._grow(batch.growths)
        for number, chunk in enumerate(batch.chunks):
            self._copy(copy for copy in batch.copies if copy.after == number)
            self._prefill(chunk)
        self._copy(copy for copy in batch.copies if copy.after == len(batch.chunks))
        records = None
        if batch.rounds:
            constrained = functools.partial(run_constrained, decoder, matchers) if matchers else None
            run = decode or constrained or decoder.decode
            TRACING.launched()
            live = self._live(batch.live)
            self.state, records = run(self.weights, self.state, np.int32(batch.rounds), *live)
        last = jnp.copy(self.state.active) if records is None else None
        if self.overlapped:
            for array in jax.tree.leaves(records):
                if isinstance(array, jax.Array):  # rounds under grammars fetch some themselves
                    array.copy_to_host_async()
        self.in_flight.append(Flight(batch, records, started, last))

    def collect(self) -> BatchResult:
        """Waits for the oldest batch in flight, and returns its results."""
        batch, records, started, last = self.in_flight[0]
        with together(self.decoder.mesh):
            if last is not None:
                jax.device_get(last)  # waits for the prefill
            records = jax.device_get(records)
        self.in_flight.popleft()
        # The device began with it when the batch before was over, if that was in flight too.
        ended, before = time.perf_counter(), self._collected
        self._collected = ended
        seconds = None if started is None else ended - max(started, before)
        if records is None:
            return BatchResult(batch, seconds)
        # Rounds that ran come first.
        ran = int((records.tree_sizes > 0).any(axis=1).sum())
        records = jax.tree.map(lambda leaf: leaf[:ran], records)
        warn_of_nan(records.nan_drafts)
        expected, accepted = records.reach or (None, None)
        trees = records.tokens, records.tree_sizes, records.tree_depths
        return BatchResult(batch, seconds, *trees, expected, accepted, records.logprobs)

    def score(self, prompt: np.ndarray) -> Logprobs:
        """Log-probabilities of a prompt's tokens but the first, on the host, in one row of tokens."""
        if self._scored[0] != (key := prompt.tobytes()):  # completions of a prompt come one after another
            self.compiler.compile([Program(SCORES, 1, scored_pages(len(prompt) - 1))])
            parts = score_prompt(self.decoder.alone, self.weights.target, prompt, self._dtype)
            with together(self.decoder.mesh):
                parts = jax.device_get(parts)
            joined = jax.tree.map(lambda *rows: np.concatenate([row[0] for row in rows]), *parts)
            self._scored = key, joined
        return self._scored[1]

    def programs(self, kinds: Sequence[Kind], *, scores: bool = False) -> list[Program]:
        """Prefill forwards, rounds of some kinds and ``scores`` of prompts, in the order of compiling."""
        pages = [1 << power for power in range(scored_pages(self.size.capacity).bit_length())]
        scoring = [Program(SCORES, 1, count) for count in pages if scores]
        return [*compile_order(self.size, tuple(self.decoders), kinds), *scoring]

    def free(self) -> None:
        """Deletes the stores, even if other references to them exist; the runner is unusable afterwards."""
        self.compiler.stop()
        self.in_flight.clear()
        for array in jax.tree.leaves((self.state, self.snapshots)):
            array.delete()

    def _admit(self, admission: Admission) -> None:
        decoder = self.decoder
        settings = SlotSettings.of(
            admission.params,
            admission.stop_ids,
            vocab_size=decoder.target.vocab_size,
            budget=admission.budget,
            depth=admission.depth,
            routing=dict(admission.routing),
        )._replace(remaining=np.int32(admission.remaining))
        # NumPy scalars, because Python integers would need a program of their own.
        slot, anchor = np.int32(admission.slot), np.int32(admission.anchor)
        start = anchor, np.int32(admission.length), np.bool_(admission.active)
        adjusting = admission.adjusting
        if adjusting is not None and self.state.adjust is None:
            self.state = replace(self.state, adjust=decoder.adjustments(self.size.slots))
        self.state = decoder.insert(self.state, slot, admission.pages, settings, *start)
        if adjusting is not None:
            adjustments = Adjustments.of(
                admission.params,
                vocab_size=decoder.target.vocab_size,
                prompt=adjusting.prompt.tolist(),
                output=adjusting.output,
                endings=adjusting.endings,
                bad_words=adjusting.bad_words,
            )
            self.state = decoder.adjust(self.state, slot, adjustments)

    def _grow(self, growths: Sequence[Growth]) -> None:
        """Sets all new block tables in one call, which costs the host less than one call each."""
        count, pages = self.size.slots, self.size.pages_per_slot
        slots, tables = np.full(count, count, np.int32), np.full((count, pages), NO_PAGE, np.int32)
        for place, growth in enumerate(growths):
            slots[place], tables[place] = growth
        self.state = self.decoder.grow(self.state, slots, tables)

    def _copy(self, copies: Iterable[SlotCopy]) -> None:
        models = self.decoder.models
        for _, slot, place, restores in copies:
            where = np.int32(slot), np.int32(place)
            if restores:
                self.state = restore(models, self.state, self.snapshots, *where)
            else:
                self.snapshots = keep(models, self.state, self.snapshots, *where)

    def _live(self, slots: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The live slots as arguments of `TreeDecoder.decode`; none if all slots are live."""
        all_live = tuple(slots) == tuple(range(self.size.slots))
        return () if all_live else (np.array(slots, np.int32),)

    def _prefill(self, chunk: Chunk) -> None:
        self.state = self.decoder.prefill(self.weights, self.state, *chunk)
