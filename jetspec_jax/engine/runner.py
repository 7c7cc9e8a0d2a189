"""The device's end of an engine: launches a batch, and later collects what it did."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.logprobs import Logprobs
from jetspec_jax.decode.snapshots import keep, restore
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, SlotSettings
from jetspec_jax.device.mesh import on_all_devices
from jetspec_jax.device.processes import agreed, spans, together
from jetspec_jax.engine.budget_policy import USUAL_ROUNDS
from jetspec_jax.engine.constrained import ConstrainedRounds
from jetspec_jax.engine.known_costs import known_costs, learn_costs
from jetspec_jax.engine.memory import empty_snapshots, empty_state
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.records import Batch, Chunk, DispatchRecord, Growth, SlotCopy
from jetspec_jax.engine.round_costs import Pair, RoundCosts, measure_round_costs, timed_contexts
from jetspec_jax.engine.wants import Kind, PromptScores, adjusted, decoder_for, joined
from jetspec_jax.progress import unseen, waiting
from jetspec_jax.sampling.grammar import Matcher

#: Runs up to so many rounds, as `TreeDecoder.decode` does: weights, state (donated), rounds, and the live
#: slots where they are not all.
Decode = Callable[..., tuple[DecodeState, RoundRecord]]
# More than any dispatch emits: no slot may stop while it is timed.
_ENDLESS = 2**30


class Flight(NamedTuple):
    """A batch on its way.

    Attributes:
        batch: What was launched.
        records: Of its rounds, on the device; None without any.
        scored: What is told of prompts, by slot, in parts and on the device.
        started: When its rounds began, by `time.perf_counter`; None where they are not timed.
    """

    batch: Batch
    records: RoundRecord | None
    scored: list[tuple[int, list[Logprobs]]]
    started: float | None


class Runner:
    """The state of all slots on the device, and the programs that work on it."""

    def __init__(self, plan: EnginePlan, weights: DecodeWeights):
        """Allocates the stores; rounds are compiled when they are first launched.

        Args:
            plan: The engine.
            weights: The parameters.
        """
        #: One for each bucket that batches may name.
        self.decoders = {decoder.bucket: decoder for decoder in plan.decoders}
        self.decoder = plan.decoders[-1]
        self.weights, self.size, self.dtype = weights, plan.size, plan.dtype
        self._cost_key = plan.cost_key
        # To free a free slot changes nothing; else the first that ends would wait for the compiler.
        self.state = self.decoder.release(empty_state(plan), np.int32(0))
        self._grow(())  # likewise
        self.snapshots = empty_snapshots(plan)
        if plan.size.snapshots:
            self._copy([SlotCopy(0, 0, 0, restores=False), SlotCopy(0, 0, 0, restores=True)])  # likewise
        self._scores = PromptScores(self.decoder.alone, weights.target, plan.dtype)
        #: What was launched and not collected; None is nothing.
        self.in_flight: Flight | None = None
        # What programs have been called: the kind, and what they are for.
        self._compiled: set[tuple[str, int, int]] = set()

    def launch(
        self,
        batch: Batch,
        decode: Decode | None = None,
        *,
        matchers: Mapping[int, Matcher] | None = None,
    ) -> None:
        """Starts a batch; `collect` waits for it. The caller has collected the one before.

        Args:
            batch: What to do.
            decode: What runs the rounds; None is `decode` of the bucket's decoder.
            matchers: By slot, the grammars that outputs follow: with any, this waits for all rounds but the
                last.
        """
        bucket = batch.bucket if batch.rounds else self.decoder.bucket
        decoder = self.decoder_for(bucket, adjusts=batch.adjusts, logprobs=batch.logprobs)
        kind = Kind(batch.adjusts, batch.logprobs, bool(matchers))
        rounds = str(kind), len(batch.live), batch.bucket
        for slot in batch.releases:
            self.state = decoder.release(self.state, np.int32(slot))
        for own in batch.admissions:
            settings = SlotSettings.of(
                own.params,
                own.stop_ids,
                vocab_size=decoder.target.vocab_size,
                budget=own.budget,
                depth=own.depth,
                routing=dict(own.routing),
            )._replace(remaining=np.int32(own.remaining))
            # NumPy scalars have one type on every call; a Python int is another program than an array.
            begins = np.int32(own.anchor), np.int32(own.length), np.bool_(own.active)
            self.state = decoder.insert(self.state, np.int32(own.slot), own.pages, settings, *begins)
            self.state = adjusted(decoder, self.state, own)
        scored = self._scores.launch(batch)
        if batch.growths:
            self._grow(batch.growths)
        for number, chunk in enumerate(batch.chunks):
            self._copy(own for own in batch.copies if own.after == number)
            self._prefill(chunk)
        self._copy(own for own in batch.copies if own.after == len(batch.chunks))
        # Rounds that wait for a prompt, for the compiler or for the host are not timed.
        alone = not (batch.chunks or batch.copies or scored or matchers)
        started = time.perf_counter() if alone and rounds in self._compiled else None
        records = None
        if batch.rounds:
            own = self._live(batch.live)
            run = decode or (ConstrainedRounds(decoder, matchers) if matchers else decoder.decode)
            with self._compiling(rounds):
                self.state, records = run(self.weights, self.state, np.int32(batch.rounds), *own)
        self.in_flight = Flight(batch, records, scored, started)

    def decoder_for(self, bucket: int, *, adjusts: bool = False, logprobs: bool = False) -> TreeDecoder:
        """The decoder of a bucket whose rounds also do this."""
        return decoder_for(self.decoders[bucket], adjusts=adjusts, logprobs=logprobs)

    def extend(self, bad_words: tuple[int, int]) -> None:
        """Makes arrays for what slots want of the logits, or larger ones; what they want already stays.

        Args:
            bad_words: Room for the bad words of each: see `TreeDecoder.adjustments`.
        """
        adjust = self.decoder.adjustments(self.size.slots, bad_words, self.state.adjust)
        self.state = replace(self.state, adjust=adjust)

    def _grow(self, growths: Sequence[Growth]) -> None:
        """All in one call, which costs the host less than one for each."""
        count, pages = self.size.slots, self.size.pages_per_slot
        slots, tables = np.full(count, count, np.int32), np.full((count, pages), NO_PAGE, np.int32)
        for place, own in enumerate(growths):
            slots[place], tables[place] = own
        self.state = self.decoder.grow(self.state, slots, tables)

    def _copy(self, copies: Iterable[SlotCopy]) -> None:
        """To snapshots and back, in order."""
        models = self.decoder.models
        for _, slot, place, restores in copies:
            where = np.int32(slot), np.int32(place)
            if restores:
                self.state = restore(models, self.state, self.snapshots, *where)
            else:
                self.snapshots = keep(models, self.state, self.snapshots, *where)

    def _live(self, slots: Sequence[int]) -> tuple[np.ndarray, ...]:
        """The live slots as `TreeDecoder.decode` takes them; nothing if they are all."""
        everyone = tuple(slots) == tuple(range(self.size.slots))
        return () if everyone else (np.array(slots, np.int32),)

    def _prefill(self, chunk: Chunk) -> None:
        with self._compiling(("prompts", *chunk.tokens.shape)):
            self.state = self.decoder.prefill(self.weights, self.state, *chunk)

    def compile_chunks(self) -> None:
        """Compiles the forwards of prompts of all shapes, by running them on none."""
        for prompts, rows in self.size.chunks:
            slots, nothing = np.arange(prompts, dtype=np.int32), np.zeros(prompts, np.int32)
            self._prefill(Chunk(slots, np.zeros((prompts, rows), np.int32), nothing, nothing > 0))

    def compile_rounds(self, kind: Kind) -> None:
        """Compiles the rounds of all shapes that do something beside, by running them for nobody.

        What slots hold stays as it is; nothing is in flight.
        """
        shapes, active = self.size.rounds(tuple(self.decoders)), self.state.active
        nobody = np.zeros(self.size.slots, bool)
        for live, bucket in tqdm(shapes, desc=f"compiling {kind}", delay=2, disable=unseen(), leave=False):
            decoder = self.decoder_for(bucket, adjusts=kind.adjusts, logprobs=kind.logprobs)
            run = ConstrainedRounds(decoder, {}) if kind.masked else decoder.decode
            with self._compiling((str(kind), live, bucket)):
                state = replace(self.state, active=on_all_devices(self.decoder.mesh, nobody))
                state, records = run(self.weights, state, np.int32(1), *self._live(range(live)))
                self.state = replace(state, active=active)
                with together(self.decoder.mesh):
                    jax.block_until_ready(records)

    def compile_scores(self) -> None:
        """Compiles what tells of prompts, of all lengths."""
        self._scores.compile(self.size.capacity)

    def collect(self) -> DispatchRecord:
        """Waits for the batch that was launched; may be repeated while that is in flight.

        Raises:
            RuntimeError: No batch was launched.
        """
        if self.in_flight is None:
            raise RuntimeError("no batch was launched")
        batch, records, scored, started = self.in_flight
        with waiting("decoding"), together(self.decoder.mesh):
            if records is None:
                jax.device_get(self.state.active)  # the prompts are waited for
            records, scored = jax.device_get((records, scored))
        prompts = tuple((slot, joined(parts)) for slot, parts in scored)
        if records is None:
            return self._nothing(batch)._replace(scored=prompts)
        seconds = None if started is None else time.perf_counter() - started
        # Rounds that ran are the first.
        ran = int((records.tree_sizes > 0).any(axis=1).sum())
        records = jax.tree.map(lambda leaf: leaf[:ran], records)
        reach = () if records.reach is None else (records.reach.expected, records.reach.accepted)
        told = DispatchRecord(batch.bucket, batch.live, seconds, records.tokens, records.tree_sizes, *reach)
        return told._replace(logprobs=records.logprobs, scored=prompts)

    def _nothing(self, batch: Batch) -> DispatchRecord:
        """Of a batch without rounds."""
        shape = 0, len(batch.live), self.decoder.depth + 1
        return DispatchRecord(
            batch.bucket, batch.live, None, np.zeros(shape, np.int32), np.zeros(shape[:2], np.int32)
        )

    def free(self) -> None:
        """Frees the stores, whoever still names them; the runner is of no use afterwards."""
        for array in jax.tree.leaves((self.state, self.snapshots)):
            array.delete()

    def round_costs(self) -> RoundCosts:
        """What rounds of every shape cost here: measured once for each kind of engine.

        Compiles the programs of all shapes, so that a change of the bucket compiles nothing.
        """
        if (costs := known_costs(self._cost_key)) is not None:
            self.compile_rounds(Kind())
            return costs
        deepest = 1 + max(decoder.depth for decoder in self.decoders.values())
        low, high, rounds = timed_contexts(self.size.capacity, USUAL_ROUNDS, deepest)
        shapes = self.size.rounds(tuple(self.decoders))
        costs = measure_round_costs(self.time_dispatch, shapes, (low, high), rounds)
        learn_costs(self._cost_key, costs)
        return costs

    def time_dispatch(self, shape: Pair, context: int, rounds: int) -> float:
        """Seconds of a dispatch of greedy rounds after ``context`` tokens in every slot; the slots are free.

        What the slots' pages hold is of no use afterwards.

        Args:
            shape: How many slots are live, and nodes of a tree, root included.
            context: Committed tokens of each slot.
            rounds: How many.
        """
        live, bucket = shape
        decoder, free = self.decoders[bucket], replace(self.state, adjust=None)
        batch, pages = free.slots.block_tables.shape
        # Where there are fewer pages than all slots could name, several slots name one.
        tables = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
        put = functools.partial(on_all_devices, decoder.mesh)
        state = replace(
            free,
            slots=free.slots._replace(
                block_tables=put(tables % self.size.num_pages),
                lengths=put(np.full(batch, context, np.int32)),
            ),
            room=put(np.full(batch, 2 * _ENDLESS - 1, np.int32)),
            active=put(np.ones(batch, bool)),
            settings=free.settings._replace(
                budget=put(np.full(batch, bucket, np.int32)),
                depth=put(np.full(batch, decoder.depth, np.int32)),
                remaining=put(np.full(batch, _ENDLESS, np.int32)),
            ),
        )
        kept = jax.tree.map(jnp.copy, replace(free, stores=(), proposer=None))
        state = jax.block_until_ready(state)
        started = time.perf_counter()
        with self._compiling(("rounds", live, bucket)):
            own = self._live(range(live))
            state, records = decoder.decode(self.weights, state, np.int32(rounds), *own)
        with together(decoder.mesh):
            jax.device_get(records)
        seconds = time.perf_counter() - started
        if spans(decoder.mesh):
            seconds = agreed(seconds, "the seconds of a dispatch")
        self.state = replace(kept, stores=state.stores, proposer=state.proposer, adjust=self.state.adjust)
        return seconds

    @contextlib.contextmanager
    def _compiling(self, program: tuple[str, int, int]) -> Iterator[None]:
        """Says on a terminal what is compiled, where this engine calls a program for the first time."""
        if program in self._compiled:
            yield
            return
        kind, count, size = program
        if kind == "prompts":
            what = f"the forward of {size} rows of {'a prompt' if count == 1 else f'{count} prompts'}"
        else:
            what = "the plain step" if size == 1 else f"the round of {size} nodes"
            what = f"the parts of {what}" if kind.startswith("masked") else what
            what += "" if count == self.size.slots else f" for {count} of {self.size.slots} slots"
        with waiting(f"compiling {what}"):
            yield
        self._compiled.add(program)
