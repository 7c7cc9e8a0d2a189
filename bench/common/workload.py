"""The requests that a benchmark decodes at each temperature: prompts with their seeds and later turns."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.common.prompts import Prompt, encode_prompts, template_arguments
from jetspec_jax import SamplingParams, Target, generate
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.prompts import EncodedPrompt
from jetspec_jax.tree import Hints

# The value of --task that gives algorithms the task of each prompt as its set has it.
TASK_OF_SET = "set"


@dataclass(frozen=True)
class Workload:
    """The requests of one temperature: prompts, their token ids, parameters, and hints for routers."""

    prompts: list[Prompt]
    ids: list[list[int]]
    params: list[SamplingParams]
    routing: list[Hints | None]

    def parts(self, size: int) -> Iterator["Workload"]:
        """Consecutive parts of ``size`` prompts."""
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
    """The workload of each temperature, in ascending order; prompt i has seed i.

    Later turns of a conversation become further prompts, after plain decoding's answers to the earlier turns.
    Every method gives these same answers, so every method gets the same prompts.

    Args:
        arguments: The command line, with `bench.common.pair.add_pair_arguments`.
        batch: The most prompts decoded at once while earlier turns are answered.

    Raises:
        ValueError: A prompt cannot be encoded, or does not fit into the target's context with its answer; or
            the chat template has no argument for thinking.
    """
    template = template_arguments(target, arguments.enable_thinking)
    works = {temperature: Workload([], [], [], []) for temperature in sorted(set(temperatures))}
    for temperature, work in works.items():
        turn = list(prompts)
        while turn:
            first = len(work.prompts)
            ids = encode_prompts(target, turn, template)
            params = [
                SamplingParams(temperature=temperature, seed=first + i, max_tokens=arguments.max_tokens)
                for i in range(len(turn))
            ]
            for prompt, tokens, sampling in zip(turn, ids, params, strict=True):
                try:
                    check_request(target, tokens, sampling)
                except ValueError as error:
                    raise ValueError(f"prompt {prompt.id}: {error}") from error
                work.routing.append(_hints(prompt, arguments.task))
            work.prompts.extend(turn)
            work.ids.extend(ids)
            work.params.extend(params)
            turn = _next_turn(target, turn, ids, params, batch, arguments.implementation)
    return works


def _hints(prompt: Prompt, task: str | None) -> Hints | None:
    hint = prompt.task if task == TASK_OF_SET else task
    return None if hint is None else {"task": hint}


def _next_turn(
    target: Target,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    params: Sequence[SamplingParams],
    batch: int,
    implementation: str | None,
) -> list[Prompt]:
    """The conversations with further turns, each with plain decoding's answer and its next turn."""
    unfinished = [i for i, prompt in enumerate(prompts) if prompt.later]
    # With a template the target answers, without one it continues a text: see `encode_prompts`.
    continues = not getattr(target.tokenizer, "chat_template", None)
    answers = generate(
        target,
        [EncodedPrompt(np.asarray(ids[i], np.int32), continues=continues) for i in unfinished],
        [params[i] for i in unfinished],
        max_slots=batch,
        implementation=implementation,
    )
    return [prompts[i].answered(answer.text or "") for i, answer in zip(unfinished, answers, strict=True)]
