"""Times rounds: the programs of all cases are interleaved, and share the stores of their scene.

Rounds are timed as engines run them: in a loop on the device, and singly, each launched while the one before
runs.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bench.common.collectives import Collective, collectives
from bench.common.kernel_trace import Kernel, trace_kernels
from bench.common.scene import Scene
from bench.common.shapes import PairShape
from bench.common.timing import compile_seconds, median, seconds_of
from bench.round.phases import PHASES, repeat
from bench.round.touched import experts_touched
from jetspec_jax import DecodeState, DecodeWeights, DraftHeadProposer, SamplingParams, TreeDecoder
from jetspec_jax.decode.state import Stores, join, split
from jetspec_jax.tree import DEFAULT_ALGORITHM, bucket_for

# A phase is repeated until its program takes this long, so that the launch (about 0.1 ms) is negligible.
PHASE_SECONDS = 0.05
#: Rounds of a loop, by default.
ROUNDS = 64


class RoundCase(NamedTuple):
    """A timed round: slots, committed tokens per slot, nodes per tree, and the tree algorithm.

    A budget of 1 is a plain step, which uses no algorithm.
    """

    batch: int
    context: int
    budget: int
    algorithm: str = DEFAULT_ALGORITHM

    @property
    def plain(self) -> "RoundCase":
        """The plain step with the same slots."""
        return RoundCase(self.batch, self.context, 1)

    @property
    def tree(self) -> str:
        """The algorithm, or "plain" for a plain step."""
        return "plain" if self.budget == 1 else self.algorithm

    def __str__(self) -> str:
        return f"batch {self.batch}, context {self.context}, budget {self.budget}, {self.tree}"


@dataclass(frozen=True)
class Setup:
    """The settings that all cases share: the command's, see `bench.round.command`."""

    params: SamplingParams
    width: int | None
    rounds: int
    repeats: int
    implementation: str
    phases: bool
    profile: bool
    candidates: int | None = None
    mesh: Mesh | None = None

    def steps(self, cases: int) -> int:
        """The number of steps that `measure` reports."""
        return cases * (1 + 2 * self.repeats + (len(PHASES) if self.phases else 0) + self.profile)

    def scene(self, case: RoundCase, shape: PairShape) -> Scene:
        """The slots of a case, with room for all tokens that a dispatch may commit."""
        return Scene(case.batch, case.context, self.rounds * shape.head.block_size)

    def decoder(self, case: RoundCase, shape: PairShape) -> TreeDecoder:
        """The decoder that an engine would use; with a budget of 1 it has no head."""
        return TreeDecoder(
            shape.target,
            None if case.budget == 1 else DraftHeadProposer(shape.head, self.implementation),
            bucket=bucket_for(case.budget),
            width=self.width,
            algorithm=case.algorithm,
            candidates=self.candidates,
            max_rounds=self.rounds,
            implementation=self.implementation,
            mesh=self.mesh,
        )


@dataclass
class CaseRuns:
    """The measurements of a case.

    Attributes:
        seconds: Seconds of each timed dispatch.
        single_seconds: Seconds of as many rounds, each launched as one program.
        tokens_per_round: Mean committed tokens over slots and rounds.
        phase_seconds: Seconds of each phase.
        compile_seconds: Seconds to trace and compile each program.
        experts_touched: The mean number of different experts that a round reads, for each layer with experts.
        collectives: Those of the rounds' program.
        kernels: The GPU's kernels of a dispatch; None if they were not recorded.
    """

    seconds: list[float] = field(default_factory=list)
    single_seconds: list[float] = field(default_factory=list)
    tokens_per_round: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)
    experts_touched: dict[int, float] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    kernels: list[Kernel] | None = None


@dataclass(eq=False)
class Shelf:
    """Holds the stores of a scene between programs, which donate them and return new ones."""

    stores: Stores


class CaseRunner:
    """Runs one case."""

    def __init__(
        self,
        case: RoundCase,
        shape: PairShape,
        weights: DecodeWeights,
        prepared: DecodeWeights,
        setup: Setup,
        shelf: Shelf,
    ):
        """Makes the state, and compiles nothing yet; single rounds have the ``prepared`` parameters."""
        self.case, self.setup, self.measured = case, setup, CaseRuns()
        self._shelf = shelf
        self._decoder = setup.decoder(case, shape)
        self._single = replace(self._decoder, max_rounds=1)
        self._weights, self._prepared = (
            each._replace(proposer=None) if self._decoder.proposer is None else each
            for each in (weights, prepared)
        )
        self._state = setup.scene(case, shape).slots(
            self._decoder, dtype_of(weights), case.budget, setup.params
        )
        self._rounds = np.int32(setup.rounds)
        self._program: Any = None

    def compile(self) -> None:
        """Compiles the rounds, and runs them once."""
        seconds, program = compile_seconds(
            self._decoder.program, self._decoder, self._weights, self._start(), self._rounds
        )
        self.measured.compile_seconds["decode"] = seconds
        lowered = self._decoder.lower(self._weights, join(self._stores(), self._state))
        self.measured.collectives = collectives(lowered)
        self._program = program
        if any(layer.experts is not None for layer in self._decoder.target.layers):
            self.measured.experts_touched = self._experts_touched()
        self.decode()
        self.decode_singly()

    def decode(self) -> float:
        """Seconds of a dispatch; all dispatches start from the same state.

        Raises:
            RuntimeError: Some rounds did not run, so the seconds are not those of all rounds.
        """
        seconds, (state, records) = seconds_of(self._program, self._weights, self._start(), self._rounds)
        self._put_back(split(state)[0])
        counts = np.asarray(records.counts)[: self.setup.rounds]
        if not counts.all():
            raise RuntimeError(f"{self.case}: {int((counts == 0).sum())} of {counts.size} rounds did not run")
        self.measured.tokens_per_round = float(counts.mean())
        return seconds

    def decode_singly(self) -> float:
        """Seconds of as many rounds as a dispatch has, singly: each is fetched while the next one runs.

        Raises:
            RuntimeError: Some rounds did not run.
        """
        state, fetched, last = jax.block_until_ready(self._start()), [], None
        started = time.perf_counter()
        for _ in range(self.setup.rounds):
            state, records = self._single.decode(self._prepared, state, np.int32(1))
            if last is not None:
                fetched.append(jax.device_get(last))
            last = records
        fetched.append(jax.device_get(last))
        seconds = time.perf_counter() - started
        self._put_back(split(state)[0])
        if not all((records.tree_sizes > 0).all() for records in fetched):
            raise RuntimeError(f"{self.case}: some single rounds did not run")
        return seconds

    def time_phase(self, phase: str, made: dict[str, Any]) -> None:
        """Times one phase, and adds its result to ``made``, the results of the phases before."""
        if self.case.budget == 1 and phase == "propose":
            # Plain decoding drafts nothing; its tree is the anchor.
            made[phase] = PHASES[phase](self._decoder, self._weights, self._start(), made)
            self.measured.phase_seconds[phase] = 0.0
            return
        inputs = self._state, dict(made)
        self.measured.compile_seconds[phase], program = compile_seconds(
            repeat(self._decoder), self._decoder, phase, self._weights, self._stores(), inputs, self._rounds
        )

        def seconds_per_turn(turns: int) -> float:
            arguments = self._weights, self._stores(), inputs, np.int32(turns)
            seconds, (stores, made[phase]) = seconds_of(program, *arguments)
            self._put_back(stores)
            return seconds / turns

        seconds_per_turn(1)
        guess = seconds_per_turn(self.setup.rounds)
        turns = max(self.setup.rounds, math.ceil(PHASE_SECONDS / guess))
        timed = [seconds_per_turn(turns) for _ in range(self.setup.repeats)]
        self.measured.phase_seconds[phase] = median(timed)

    def _experts_touched(self) -> dict[int, float]:
        """Mean over the timed rounds, which run one at a time here: their tokens differ."""
        state, rounds = self._start(), []
        for _ in range(self.setup.rounds):
            rounds.append(experts_touched(self._decoder, self._weights, state))
            state, _ = self._program(self._weights, state, np.int32(1))
        self._put_back(split(state)[0])
        return jax.tree.map(lambda *counts: float(np.mean(counts)), *jax.device_get(rounds))

    def _start(self) -> DecodeState:
        """The initial state; a copy, because a dispatch's arguments are donated."""
        return join(self._stores(), jax.tree.map(jnp.copy, self._state))

    def _stores(self) -> Stores:
        if self._decoder.proposer is None:
            return self._shelf.stores[0], None
        return self._shelf.stores

    def _put_back(self, stores: Stores) -> None:
        # Plain decoding does not take the head's stores.
        head = self._shelf.stores[1] if self._decoder.proposer is None else stores[1]
        self._shelf.stores = stores[0], head


def dtype_of(weights: DecodeWeights) -> jnp.dtype:
    """The type of the parameters and the stores."""
    return weights.target["embed_tokens"].dtype


def measure(
    cases: Sequence[RoundCase],
    shape: PairShape,
    weights: DecodeWeights,
    setup: Setup,
    step: Callable[[str], None],
) -> dict[RoundCase, CaseRuns]:
    """Measures cases in turn, so that a slow period of the machine affects all of them alike.

    Memory holds the stores of all their scenes. ``step`` is called with the name of each step.
    """
    shelves: dict[Scene, Shelf] = {}
    runners, prepared = [], weights
    if setup.mesh is None:  # as engines do
        prepared = weights._replace(proposer=DraftHeadProposer(shape.head).prepare(weights.proposer))
    for case in cases:
        scene = setup.scene(case, shape)
        if scene not in shelves:
            # All decoders with a head have the same stores; a plain one lacks the head's.
            decoder = setup.decoder(case._replace(budget=2), shape)
            shelves[scene] = Shelf(scene.stores(decoder, dtype_of(weights)))
        runners.append(CaseRunner(case, shape, weights, prepared, setup, shelves[scene]))
    for runner in runners:
        step(f"compile: {runner.case}")
        runner.compile()
    for _ in range(setup.repeats):
        for runner in runners:
            step(f"rounds: {runner.case}")
            runner.measured.seconds.append(runner.decode())
            step(f"single rounds: {runner.case}")
            runner.measured.single_seconds.append(runner.decode_singly())
    for runner in runners:
        made: dict[str, Any] = {}
        for phase in PHASES if setup.phases else ():
            step(f"{phase}: {runner.case}")
            runner.time_phase(phase, made)
        if setup.profile:
            step(f"profile: {runner.case}")
            runner.measured.kernels = trace_kernels(runner.decode)
    return {runner.case: runner.measured for runner in runners}
