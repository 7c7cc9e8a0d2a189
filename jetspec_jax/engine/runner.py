"""The runner: launches batches on the device, and later collects their results, in order."""

import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.decode.logprobs import Logprobs
from jetspec_jax.decode.scoring import scored_pages
from jetspec_jax.decode.snapshots import keep, restore
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, SlotSettings
from jetspec_jax.device.processes import spans, together
from jetspec_jax.engine.compiler import Compiler
from jetspec_jax.engine.constrained import run_constrained
from jetspec_jax.engine.lowering import Lowering
from jetspec_jax.engine.memory import empty_snapshots, empty_state
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.programs import (
    KINDS,
    PREFILL,
    SCORES,
    Kind,
    Program,
    in_order,
)
from jetspec_jax.engine.records import Batch, Chunk, DispatchRecord, Growth, SlotCopy
from jetspec_jax.engine.round_kinds import PromptScores, concatenated, decoder_for, set_adjustments
from jetspec_jax.engine.tracing import TRACING
from jetspec_jax.progress import waiting
from jetspec_jax.sampling.grammar import Matcher

#: Runs rounds, as `TreeDecoder.decode` does: weights, state (donated), most rounds, and the live slots unless
#: these are all.
Decode = Callable[..., tuple[DecodeState, RoundRecord]]


class Flight(NamedTuple):
    """A launched batch.

    Attributes:
        records: Records of its rounds, on the device; None without rounds.
        scored: Log-probabilities of prompts, by slot, in parts and on the device.
        started: When its launch began, by `time.perf_counter`; None if it is not timed.
        last: An array to wait for if there are no rounds, which no launch donates; else None.
    """

    batch: Batch
    records: RoundRecord | None
    scored: list[tuple[int, list[Logprobs]]]
    started: float | None
    last: jax.Array | None


class Runner:
    """The device state of all slots, and its programs.

    Each launch donates the state, and keeps the one that it returns. So the device runs launches in order,
    and none needs the results of the one before on the host.
    """

    def __init__(self, plan: EnginePlan, weights: DecodeWeights):
        """Allocates the stores; rounds are compiled when they are first launched."""
        #: Decoders by bucket.
        self.decoders = {decoder.bucket: decoder for decoder in plan.decoders}
        self.decoder = plan.decoders[-1]
        #: Whether every program is one round, and its launch waits for nothing; else programs are loops.
        self.overlapped = False
        self.weights, self.size = weights, plan.size
        self._dtype = plan.dtype
        # Releasing a free slot changes nothing, and compiles the program before the first request ends.
        self.state = self.decoder.release(empty_state(plan), np.int32(0))
        self._grow(())  # likewise
        jnp.copy(self.state.active)  # likewise
        self.snapshots = empty_snapshots(plan)
        if plan.size.snapshots:
            self._copy([SlotCopy(0, 0, 0, restores=False), SlotCopy(0, 0, 0, restores=True)])  # likewise
        self._scores = PromptScores(self.decoder.alone, weights.target, plan.dtype)
        #: The batches in flight, in order.
        self.in_flight: deque[Flight] = deque()
        self._collected = 0.0  # when the last batch was, by `time.perf_counter`
        # Programs that have been called.
        self._called: set[Program] = set()
        self._lowering = Lowering(self.decoders, weights, self.state, plan.dtype)
        # Processes that share devices compile alike, so all programs in one order.
        self.compiler = Compiler(self._lowering.compile, 0 if spans(plan.decoder.mesh) else None)
        weakref.finalize(self, self.compiler.stop).atexit = False

    def launch(
        self,
        batch: Batch,
        decode: Decode | None = None,
        *,
        matchers: Mapping[int, Matcher] | None = None,
    ) -> None:
        """Launches a batch; `collect` waits for it.

        Args:
            decode: Runs the rounds; None is `decode` of the bucket's decoder.
            matchers: Grammar matchers by slot; with any, this waits for all rounds but the last.
        """
        bucket = batch.bucket if batch.rounds else self.decoder.bucket
        decoder = decoder_for(self.decoders[bucket], batch.kind)
        rounds = Program(str(batch.kind), len(batch.live), batch.bucket)
        for slot in batch.releases:
            self.state = decoder.release(self.state, np.int32(slot))
        for admission in batch.admissions:
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
            self.state = decoder.insert(self.state, slot, admission.pages, settings, *start)
            self.state = set_adjustments(decoder, self.state, admission)
        # Batches that wait for the compiler or for the host are not timed.
        programs = {Program(PREFILL, *chunk.tokens.shape) for chunk in batch.chunks}
        programs |= {rounds} if batch.rounds else set()
        started = time.perf_counter() if programs <= self._called and not (batch.copies or matchers) else None
        scored = self._scores.launch(batch)
        started = None if scored else started
        if batch.growths:
            self._grow(batch.growths)
        for number, chunk in enumerate(batch.chunks):
            self._copy(copy for copy in batch.copies if copy.after == number)
            self._prefill(chunk)
        self._copy(copy for copy in batch.copies if copy.after == len(batch.chunks))
        records = None
        if batch.rounds:
            live = self._live(batch.live)
            constrained = functools.partial(run_constrained, decoder, matchers) if matchers else None
            run = decode or constrained or decoder.decode
            TRACING.launched()
            with self._compiling(rounds):
                self.state, records = run(self.weights, self.state, np.int32(batch.rounds), *live)
        last = jnp.copy(self.state.active) if records is None else None
        if self.overlapped:
            for array in jax.tree.leaves(records):
                if isinstance(array, jax.Array):  # rounds under grammars fetch some themselves
                    array.copy_to_host_async()
        self.in_flight.append(Flight(batch, records, scored, started, last))

    def overlap(self) -> None:
        """From now on every program is one round.

        Grammars' rounds, and those of a caller's ``decode``, stay as they are.
        """
        if self.decoder.mesh is None and self.decoder.proposer is not None:
            # Loops do this once for all their rounds.
            self.weights = self.weights._replace(
                proposer=self.decoder.proposer.prepare(self.weights.proposer)
            )
        self.overlapped = True
        self.decoders = {bucket: replace(each, max_rounds=1) for bucket, each in self.decoders.items()}
        self._forget(KINDS)

    def extend(self, bad_words: tuple[int, int]) -> None:
        """Allocates logit adjustments of slots, or larger ones; the slots' present adjustments stay.

        Args:
            bad_words: Room for each slot's bad words: see `TreeDecoder.adjustments`.
        """
        adjust = self.decoder.adjustments(self.size.slots, bad_words, self.state.adjust)
        self.state = replace(self.state, adjust=adjust)
        self._forget([name for name, kind in KINDS.items() if kind.adjusts])

    def _forget(self, kinds: Collection[str]) -> None:
        """Forgets programs of some kinds, whose decoders or arguments have changed."""
        self._lowering.update(self.decoders, self.weights, self.state)
        self.compiler.forget(kinds)
        self._called = {program for program in self._called if program.kind not in kinds}

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
        with self._compiling(Program(PREFILL, *chunk.tokens.shape)):
            self.state = self.decoder.prefill(self.weights, self.state, *chunk)

    def rounds_of(self, kind: Kind, lives: Collection[int] | None = None) -> list[Program]:
        """Rounds of a kind, of some numbers of live slots or of all."""
        shapes = self.size.rounds(tuple(self.decoders))
        return [Program(str(kind), *shape) for shape in shapes if lives is None or shape[0] in lives]

    def programs(
        self, kinds: Sequence[Kind], lives: Collection[int] | None = None, *, scores: bool = False
    ) -> list[Program]:
        """Prefill forwards, rounds of some kinds and, with ``scores``, log-probabilities of prompts.

        They are in the order of compiling, with rounds for some numbers of live slots or for all.
        """
        every = in_order(self.size, tuple(self.decoders), kinds)
        pages = [1 << power for power in range(scored_pages(self.size.capacity).bit_length())]
        scoring = [Program(SCORES, 1, count) for count in pages if scores]
        wanted = [each for each in every if lives is None or each.kind == PREFILL or each.slots in lives]
        return [*wanted, *scoring]

    def collect(self) -> DispatchRecord:
        """Waits for the oldest batch in flight; may be repeated until the engine removes it."""
        batch, records, scored, started, last = self.in_flight[0]
        # A round is too short for a progress line, which has a thread of its own.
        shown = contextlib.nullcontext() if self.overlapped else waiting("decoding")
        with shown, together(self.decoder.mesh):
            if last is not None:
                jax.device_get(last)  # waits for the prefill
            records, scored = jax.device_get((records, scored))
        # The device began with it when the batch before was over, if that was in flight too.
        ended, before = time.perf_counter(), self._collected
        self._collected = ended
        prompts = tuple((slot, concatenated(parts)) for slot, parts in scored)
        seconds = None if started is None else ended - max(started, before)
        forwards = tuple(chunk.tokens.shape for chunk in batch.chunks)
        if records is None:
            return DispatchRecord(batch.bucket, batch.live, seconds, forwards, scored=prompts)
        # Rounds that ran come first.
        ran = int((records.tree_sizes > 0).any(axis=1).sum())
        records = jax.tree.map(lambda leaf: leaf[:ran], records)
        expected, accepted = records.reach or (None, None)
        return DispatchRecord(
            batch.bucket,
            batch.live,
            seconds,
            forwards,
            tokens=records.tokens,
            tree_sizes=records.tree_sizes,
            expected=expected,
            accepted=accepted,
            logprobs=records.logprobs,
            scored=prompts,
            tree_depths=records.tree_depths,
        )

    def free(self) -> None:
        """Deletes the stores, even if other references to them exist; the runner is unusable afterwards."""
        self.in_flight.clear()
        for array in jax.tree.leaves((self.state, self.snapshots)):
            array.delete()

    @contextlib.contextmanager
    def _compiling(self, program: Program) -> Iterator[None]:
        """Shows a progress line the first time a program is called, because it may be compiled then."""
        if program in self._called:
            yield
            return
        with waiting(f"compiling {self._title(program)}"):
            self.compiler.claim(program)
            yield
        self._called.add(program)

    def _title(self, program: Program) -> str:
        kind, count, size = program
        if kind == PREFILL:
            return f"the forward of {size} rows of {'a prompt' if count == 1 else f'{count} prompts'}"
        title = "the plain step" if size == 1 else f"the round of {size} nodes"
        title = f"the parts of {title}" if kind.startswith("masked") else title
        return title + ("" if count == self.size.slots else f" for {count} of {self.size.slots} slots")
