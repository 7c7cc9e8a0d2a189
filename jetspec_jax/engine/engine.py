"""The engine: a scheduler and a runner, joined by records."""

import contextlib
import functools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.broadcast import send, sends
from jetspec_jax.engine.extras import USUAL_BAD_WORDS, Extras
from jetspec_jax.engine.memory import check_engine_memory, check_extra_memory
from jetspec_jax.engine.planning import EnginePlan, overlaps
from jetspec_jax.engine.policy import AutoBudget, BudgetPolicy, FixedBudget
from jetspec_jax.engine.programs import PREFILL, Kind, Program, first_programs
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.runner import Decode, Runner
from jetspec_jax.engine.scheduler import Scheduler
from pallas_kernels.dispatch import gpu_problem

#: Error of requests whose engine broke.
LOST = "this engine was interrupted; its requests are lost, start anew"

_log = logging.getLogger("jetspec_jax")


class Engine:
    """A fixed number of slots over one page pool.

    Callers repeat `admit`, `launch` and `collect`; only `collect` waits for the device. On a GPU a batch may
    be launched while the one before is in flight: see `overlaps` and `Scheduler`. Text is handled in
    `jetspec_jax.engine.output`. An engine is not thread-safe.

    If several processes share the mesh, all of them make the engine, but only process 0 has requests. It
    broadcasts all that the runner does: see `jetspec_jax.engine.worker`.

    An error or an interrupt within a scheduling step leaves host and device in different states. The engine
    is then `broken`, and refuses all further calls.
    """

    def __init__(
        self,
        plan: EnginePlan,
        weights: DecodeWeights,
        overlapped: bool | None = None,
        *,
        background: bool = False,
    ):
        """Allocates the stores, after a check of the device memory.

        Args:
            overlapped: Whether to launch single rounds, with two batches in flight, instead of loops; None
                chooses for the devices.
            background: Whether a persistent engine compiles here only the programs that can serve any
                request, and all others in the background. Processes that share devices compile everything
                here.

        Raises:
            DeviceMemoryError: The device cannot hold the stores and a round's workspace.
        """
        self._broadcasts = sends(plan.decoder.mesh)
        check_engine_memory(plan)
        if plan.decoder.proposer is None:
            weights = weights._replace(proposer=None)
        self.plan, self.weights = plan, weights
        #: The plan with all slots that were asked for: an equal need would make the same engine again.
        self.planned = plan
        self.runner = Runner(plan, weights)
        self.compiler = self.runner.compiler
        self.broken = False
        self._background = background and plan.persistent and not spans(plan.decoder.mesh)
        #: Record of the last batch.
        self.record: DispatchRecord | None = None
        try:
            if plan.extras.adjusts:
                self.runner.extend(plan.extras.bad_words)
            if overlapped is None:
                overlapped = overlaps(plan)
            if overlapped:
                self.runner.overlap()
            most_tokens = 1 + max(decoder.depth for decoder in plan.decoders)
            self.scheduler = Scheduler(
                plan.size, self._policy(), most_tokens, self.compiler, overlapped=overlapped
            )
            self._compile_first()
        except BaseException:
            self.runner.free()  # the traceback may keep references to the stores
            raise
        if plan.decoder.implementation is None:
            log_attention_fallback()
        if not plan.size.shares_pages:
            log_no_prefix_sharing(plan.decoder.target.model_type)

    def admit(self, request: Request) -> Request:
        """Queues a request, and allocates device arrays for features that no earlier request used.

        Raises:
            ValueError: It can never be served.
            DeviceMemoryError: The device cannot hold the arrays.
        """
        self.extend(Extras.of([request]))
        self.scheduler.add(request)
        return request

    def extend(self, extras: Extras) -> None:
        """Allocates device arrays for more optional features.

        Raises:
            DeviceMemoryError: The device cannot hold them.
        """
        joined, plan = self.plan.extras | extras, self.plan
        if self.broken or joined == plan.extras:
            return
        if self._broadcasts:
            send("extend", joined)
        extended = replace(plan, extras=joined)
        check_extra_memory(extended)
        if (joined.adjusts, joined.bad_words) != (plan.extras.adjusts, plan.extras.bad_words):
            self.runner.extend(joined.bad_words)
        self.plan = extended

    def prepare(self, requests: Sequence[Request]) -> None:
        """Compiles the programs of requests that begin together.

        So later ends of some requests compile nothing: more live slots than needed are used. Persistent
        engines compile ahead instead. No request may wait or run, and nothing may be in flight.

        Raises:
            DeviceMemoryError: The device cannot hold the arrays that they need.
            Exception: An error of the compiler or the device; the engine is broken.
        """
        if self.plan.persistent or not requests:
            return
        requests = requests[: self.plan.size.slots]
        self.extend(Extras.of(requests))
        kind = Kind.union(Kind.of(request.params) for request in requests)
        chunks = [Program(PREFILL, *shape) for shape in self.scheduler.prompt_shapes(requests)]
        rounds = self.runner.rounds_of(kind, [self.plan.size.live_for(len(requests))])
        with self._all_or_broken():
            self._compile([*chunks, *rounds])

    def launch(self, most_rounds: int | None = None, decode: Decode | None = None) -> bool:
        """Launches the next batch: admissions, prefill, and rounds.

        Args:
            most_rounds: Most rounds for this caller; None leaves them to the policy.
            decode: Runs the rounds; None is the decoder that the policy chooses.

        Returns:
            Whether it did; if not, the batch in flight must be collected first.

        Raises:
            RuntimeError: As many batches are in flight as may be, a launch was interrupted, or no request can
                ever run.
        """
        if self.broken:
            raise RuntimeError(LOST)
        if not self.has_room:
            raise RuntimeError("a batch was launched and not collected")
        if decode is not None and self.runner.in_flight:
            return False
        with self._all_or_broken():
            batch = self.scheduler.next_batch(most_rounds)
            if batch is None:
                return False
            if self._broadcasts:
                send("batch", batch)
            self.runner.launch(batch, decode, matchers=self.scheduler.matchers)
        return True

    def collect(self) -> list[Request]:
        """Waits for the oldest batch in flight, and hands out its tokens; returns the requests that decoded.

        Raises:
            RuntimeError: No batch is in flight.
        """
        if self.broken:
            raise RuntimeError(LOST)
        if not self.runner.in_flight:
            raise RuntimeError("no batch was launched")
        try:
            record = self.runner.collect()
        except Exception:  # a device error: there will be no record; after an interrupt, there will
            self.broken = True
            raise
        with self._all_or_broken():
            self.runner.in_flight.popleft()
            served = self.scheduler.update(record)
            self.record = record._replace(idle_rounds=self.scheduler.idle_rounds)
        for request in served:
            request.notify()
        return served

    def step(self, most_rounds: int | None = None, decode: Decode | None = None) -> list[Request]:
        """Launches as many batches as may be in flight, and collects the oldest."""
        while self.has_room and self.launch(most_rounds, decode):
            pass
        return self.collect()

    def compile(
        self,
        kinds: Sequence[Kind],
        *,
        counts: Iterable[int] | None = None,
        scores: bool = False,
        wait: bool = True,
    ) -> None:
        """Compiles all prefill forwards, and the rounds of some kinds; nothing may be in flight.

        Args:
            counts: Numbers of decoding requests; None is any number.
            scores: Whether to compile log-probabilities of prompts.
            wait: Whether to wait until they are compiled; else an engine compiles them in the background, if
                it does so.

        Raises:
            DeviceMemoryError: The device cannot hold the arrays that such requests need.
        """
        kind = Kind.union(kinds)
        bad_words = USUAL_BAD_WORDS if kind.adjusts and self.plan.persistent else (0, 0)
        self.extend(Extras(kind.adjusts, bad_words, kind.logprobs, scores))
        lives = None if counts is None else [self.plan.size.live_for(count) for count in counts]
        programs = self.runner.programs(kinds, lives, scores=scores)
        if wait or not self._background:
            self._compile(programs)
        else:
            self.compiler.add(programs)

    def _compile(self, programs: Sequence[Program]) -> None:
        if self._broadcasts:
            send("compile", programs)
        self.compiler.compile(programs)

    def stop_background(self) -> None:
        """Ends what it does in the background: programs are compiled when they are needed."""
        self.compiler.stop()

    def close(self) -> None:
        """Deletes the stores, even if other references to the engine exist; its requests fail."""
        self.broken = True
        self.stop_background()
        for request in self.scheduler.requests:
            request.fail(RuntimeError(LOST))
        self.runner.free()

    @contextlib.contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        """Marks the engine as broken if its body does not finish."""
        self.broken = True
        yield
        self.broken = False

    @property
    def has_room(self) -> bool:
        """Whether another batch may be in flight."""
        return self.scheduler.has_room

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.busy

    def _policy(self) -> BudgetPolicy:
        auto, shapes = self.plan.auto, self.plan.size.rounds(tuple(self.runner.decoders))
        if auto is None:
            return FixedBudget(shapes, overlapped=self.runner.overlapped)
        return AutoBudget(shapes, auto.probing, overlapped=self.runner.overlapped)

    def _compile_first(self) -> None:
        """Compiles what must exist before any request; the rest comes later.

        An engine with several numbers of live slots that is not persistent compiles nothing: see `prepare`.
        """
        runner, compiler = self.runner, self.compiler
        if self._background:
            compiler.ahead = True
            compiler.compile(first_programs(self.plan.size, tuple(runner.decoders)))
            compiler.add(runner.programs([Kind()]))
        elif self.plan.persistent or not self.plan.size.live:
            compiler.compile(runner.rounds_of(Kind()))


@functools.cache
def log_attention_fallback() -> None:
    """Logs, once per process, why the GPU kernels cannot run, if they cannot."""
    if problem := gpu_problem():
        _log.warning("tree attention runs on XLA: %s", problem)


@functools.cache
def log_no_prefix_sharing(model_type: str) -> None:
    """Logs, once per process and type of model, that requests share no prefixes."""
    _log.info(
        "%s: each slot has windows or states of its own, and this engine keeps no snapshots of them, "
        "so requests share no beginnings",
        model_type,
    )
