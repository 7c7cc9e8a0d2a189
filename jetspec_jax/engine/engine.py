"""The engine: a scheduler and a runner, joined by records."""

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.processes import agreed, is_first, spans
from jetspec_jax.engine.agreement import check_alike_engines
from jetspec_jax.engine.broadcast import send
from jetspec_jax.engine.budget_policy import AutoBudget, BudgetPolicy, FixedBudget, LatePolicy
from jetspec_jax.engine.compiler import Compiler
from jetspec_jax.engine.extras import USUAL_BAD_WORDS, Extras
from jetspec_jax.engine.memory import check_engine_memory, check_extra_memory
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.programs import Kind
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.round_costs import Measurement
from jetspec_jax.engine.runner import Decode, Runner
from jetspec_jax.engine.scheduler import Scheduler
from pallas_kernels.dispatch import gpu_problem

#: Error of requests whose engine broke.
LOST = "this engine was interrupted; its requests are lost, start anew"

# Numbers of engines that several processes share.
_NUMBERS = itertools.count(1)
_log = logging.getLogger("jetspec_jax")


class Engine:
    """A fixed number of slots over one page pool.

    Callers repeat `admit`, `launch` and `collect`; only `collect` waits for the device. Text is handled in
    `jetspec_jax.engine.output`. An engine is not thread-safe.

    On a mesh of several processes, all processes make the same calls. Before every launch, process 0 sends
    the time, the seconds of the last launch, and its cancelled requests. If the plan has workers, only
    process 0 has requests, and it broadcasts all that the runner does: see `jetspec_jax.engine.worker`.

    An error or an interrupt within a scheduling step leaves host and device in different states. The engine
    is then `broken`, and refuses all further calls.
    """

    def __init__(self, plan: EnginePlan, weights: DecodeWeights, *, background: bool = False):
        """Allocates the stores, after a check of the device memory.

        Args:
            plan: The engine plan.
            weights: The parameters.
            background: Whether a persistent engine compiles here only the programs that can serve any
                request, and all others in the background, and measures their round times later: see
                `measure`. Processes that share devices compile everything here.

        Raises:
            DeviceMemoryError: The device cannot hold the stores and a round's workspace.
            ValueError: Several processes make different engines.
        """
        self._step, self._broadcasts = "", plan.has_workers and is_first()
        if self._broadcasts:
            send("engine")
        if spans(plan.decoder.mesh):
            check_alike_engines(plan)
            self._step = "" if plan.has_workers else f"a step of engine {next(_NUMBERS)}"
        check_engine_memory(plan)
        if plan.decoder.proposer is None:
            weights = weights._replace(proposer=None)
        self.plan, self.weights = plan, weights
        self.runner = Runner(plan, weights)
        self.broken = False
        self._background = background and plan.persistent and not spans(plan.decoder.mesh)
        self._measurement: Measurement | None = None
        #: Record of the last batch.
        self.record: DispatchRecord | None = None
        try:
            if plan.extras.adjusts:
                self.runner.extend(plan.extras.bad_words)
            most_tokens = 1 + max(decoder.depth for decoder in plan.decoders)
            self.scheduler = Scheduler(plan.size, self._policy(), most_tokens, self.compiler)
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
            ValueError: It can never be served; or several processes serve it, and have not compared it.
            DeviceMemoryError: The device cannot hold the arrays.
        """
        if self._step and not request.shared:
            raise ValueError(
                "an engine of several processes serves only requests of plan_requests, which compares them"
            )
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

    def launch(self, most_rounds: int | None = None, decode: Decode | None = None) -> None:
        """Launches the next batch: admissions, prefill, and rounds.

        Args:
            most_rounds: Most rounds for this caller; None leaves them to the policy.
            decode: Runs the rounds; None is the decoder that the policy chooses.

        Raises:
            RuntimeError: A launch was not collected or was interrupted, or no request can ever run.
            OutOfStep: Another process does something else.
        """
        if self.broken:
            raise RuntimeError(LOST)
        if self.runner.in_flight:
            raise RuntimeError("a batch was launched and not collected")
        policy, now = self.scheduler.policy, time.monotonic()
        if isinstance(policy, LatePolicy):
            how = "a traced round" if decode else f"at most {most_rounds or 'as many as suit'} rounds"
            policy.seconds, now = agreed([policy.seconds, now], f"{self._step}: {how}")
        with self._all_or_broken():
            batch = self.scheduler.next_batch(most_rounds, now)
            if self._broadcasts:
                send("batch", batch)
            self.runner.launch(batch, decode, matchers=self.scheduler.matchers)

    def collect(self) -> list[Request]:
        """Waits for the batch in flight, and hands out its tokens; returns the requests that decoded.

        Raises:
            RuntimeError: No batch is in flight.
        """
        if self.broken:
            raise RuntimeError(LOST)
        if self.runner.in_flight is None:
            raise RuntimeError("no batch was launched")
        try:
            record = self.runner.collect()
        except Exception:  # a device error: there will be no record; after an interrupt, there will
            self.broken = True
            raise
        with self._all_or_broken():
            self.runner.in_flight = None
            self.record = record
            served = self.scheduler.update(record)
        for request in served:
            request.notify()
        return served

    def step(self, most_rounds: int | None = None, decode: Decode | None = None) -> list[Request]:
        """`launch` and `collect`; a batch in flight, from an interrupted step, is collected instead."""
        if not self.runner.in_flight:
            self.launch(most_rounds, decode)
        return self.collect()

    @property
    def compiler(self) -> Compiler:
        """Compiles its programs."""
        return self.runner.compiler

    def compile(self, kinds: Sequence[Kind], *, scores: bool = False, wait: bool = True) -> None:
        """Compiles prefill forwards and the rounds of some kinds, in all shapes; nothing may be in flight.

        Args:
            kinds: The kinds of rounds.
            scores: Whether to compile log-probabilities of prompts.
            wait: Whether to wait until they are compiled; else an engine compiles them in the background, if
                it does so.

        Raises:
            DeviceMemoryError: The device cannot hold the arrays that such requests need.
            Exception: An error of the compiler.
        """
        adjusts, logprobs = (any(getattr(kind, name) for kind in kinds) for name in ("adjusts", "logprobs"))
        self.extend(Extras(adjusts, USUAL_BAD_WORDS if adjusts else (0, 0), logprobs, scores))
        if self._broadcasts:
            send("compile", kinds, scores)
        self.compiler.add(programs := self.runner.programs(kinds, scores=scores))
        if wait or not self._background:
            self.compiler.wait(programs)

    @property
    def measures(self) -> bool:
        """Whether all programs are there, and round times are to be measured."""
        return self._measurement is not None and not self.compiler.left

    def measure(self) -> None:
        """Times one more dispatch; no request may have a slot. After the last one the policy gets the times.

        Requests may run between two calls. Only pages without content are overwritten, or one cached page if
        there is no other.
        """
        if (measurement := self._measurement) is None:
            return
        self.scheduler.drop_closed()
        with self.scheduler.pool.lent() as self.runner.scratch:
            try:
                next(measurement)
            except StopIteration as end:
                self._measurement = None
                self.scheduler.policy.use(end.value)
            except BaseException:
                self.broken, self._measurement = True, None
                raise

    def stop_background(self) -> None:
        """Ends what it does in the background: programs are compiled when they are needed."""
        self._measurement = None
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
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.busy

    def _policy(self) -> BudgetPolicy:
        auto, slices, costs = self.plan.auto, self.plan.slices, None
        # Round times are measured only if the policy uses them.
        if self._background:
            costs, self._measurement = self.runner.first_costs()
        elif auto is not None or slices is not None:
            costs = self.runner.round_costs()
        if auto is None or costs is None:
            policy = FixedBudget(self.plan.decoder.bucket, costs, slices, plain=len(self.runner.decoders) > 1)
        else:
            shape = functools.partial(self.compiler.shape, str(Kind()))
            policy = AutoBudget(tuple(self.runner.decoders), costs, auto.probing, slices, shape)
        return LatePolicy(policy) if self._step else policy


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
