"""What the benchmarks decode at each temperature: prompts as requests, with their seeds and later turns."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.common.prompts import Prompt, encode_prompts, template_arguments
from jetspec_jax import SamplingParams, Target, generate
from jetspec_jax.engine.admission import check_request
from jetspec_jax.tree import Hints

# Algorithms are told what the prompt set says of each prompt.
TASK_OF_SET = "set"


@dataclass(frozen=True)
class Workload:
    """What is decoded at one temperature.

    Attributes:
        prompts: What is asked.
        ids: The same as token ids.
        params: How each is sampled.
        routing: What is said of each to algorithms that route.
    """

    prompts: list[Prompt]
    ids: list[list[int]]
    params: list[SamplingParams]
    routing: list[Hints | None]

    def parts(self, size: int) -> Iterator["Workload"]:
        """The same in order, so many prompts at a time."""
        for at in range(0, len(self.ids), size):
            part = slice(at, at + size)
            yield Workload(self.prompts[part], self.ids[part], self.params[part], self.routing[part])


def make_workloads(
    arguments: argparse.Namespace,
    target: Target,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    *,
    batch: int = 1,
) -> dict[float, Workload]:
    """The work of each temperature, the lowest first.

    Args:
        arguments: With those of `bench.pair.add_pair_arguments`.
        target: The target.
        prompts: The prompts.
        temperatures: Of the sampling.
        batch: Most prompts that decode at the same time, while earlier turns are answered.

    Raises:
        ValueError: As `make_workload`, or the target's chat template knows nothing of thinking.
    """
    template = template_arguments(target, arguments.enable_thinking)
    return {
        temperature: make_workload(
            target,
            prompts,
            temperature,
            max_tokens=arguments.max_tokens,
            task=arguments.task,
            arguments=template,
            batch=batch,
            implementation=arguments.implementation,
        )
        for temperature in sorted(set(temperatures))
    }


def make_workload(
    target: Target,
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    max_tokens: int,
    task: str | None,
    arguments: Mapping[str, Any],
    batch: int,
    implementation: str | None,
) -> Workload:
    """Prompts as requests of one temperature; prompt i has seed i.

    The later turns of a conversation are prompts of their own, which follow plain decoding's answers: every
    method gives the same answers, so every method is asked the same.

    Args:
        target: The target.
        prompts: The prompts.
        temperature: Of the sampling.
        max_tokens: Most tokens of an answer.
        task: What algorithms that route are told of every prompt; "set" is what the prompt set says of each,
            None is nothing.
        arguments: Of the target's chat template.
        batch: Most prompts that decode at the same time, while earlier turns are answered.
        implementation: Of tree attention, likewise.

    Raises:
        ValueError: A prompt cannot be encoded, or it does not fit the target's context with its answer.
    """
    work = Workload([], [], [], [])
    turn = list(prompts)
    while turn:
        first = len(work.prompts)
        ids = encode_prompts(target, turn, arguments)
        params = [
            SamplingParams(temperature=temperature, seed=first + i, max_tokens=max_tokens)
            for i in range(len(turn))
        ]
        for prompt, own, sampling in zip(turn, ids, params, strict=True):
            try:
                check_request(target, own, sampling)
            except ValueError as error:
                raise ValueError(f"prompt {prompt.id}: {error}") from error
            work.routing.append(_hints(prompt, task))
        work.prompts.extend(turn)
        work.ids.extend(ids)
        work.params.extend(params)
        turn = _next_turn(target, turn, ids, params, batch, implementation)
    return work


def _hints(prompt: Prompt, task: str | None) -> Hints | None:
    said = prompt.task if task == TASK_OF_SET else task
    return None if said is None else {"task": said}


def _next_turn(
    target: Target,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    params: Sequence[SamplingParams],
    batch: int,
    implementation: str | None,
) -> list[Prompt]:
    """The conversations that go on, with plain decoding's answers."""
    going = [i for i, prompt in enumerate(prompts) if prompt.later]
    answers = generate(
        target,
        [ids[i] for i in going],
        [params[i] for i in going],
        max_slots=batch,
        implementation=implementation,
    )
    return [prompts[i].answered(answer.text or "") for i, answer in zip(going, answers, strict=True)]
