"""`LLM`: text and chats in, completions out."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from jetspec_jax.checkpoint.chat_template import check_template_arguments, render_chat
from jetspec_jax.checkpoint.loading import Head, Target, read_draft_head, read_target
from jetspec_jax.checkpoint.source import Source, resolve_dtype
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.device.compilation_cache import enable_compilation_cache
from jetspec_jax.device.memory import HEAD_WEIGHTS, TARGET_WEIGHTS, weight_bytes
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.planning import EnginePlan, plan_engine, plan_requests
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.serving import complete, engine_for
from jetspec_jax.engine.size import MAX_SLOTS, slots_for
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import Algorithm, Hints

Prompt = str | Sequence[int]
Message = Mapping[str, str]

# Rounds between two pieces of a stream: text appears while it is accepted, and little overshoots a stop.
STREAM_ROUNDS = 2


class LLM:
    """A target, its draft head, and their tokenizer.

    Example::

        llm = LLM()  # the embedded demo pair
        [completion] = llm.generate(["def read_lines(path):"], SamplingParams(max_tokens=64))
    """

    def __init__(
        self,
        target: str | Path | Target = "demo",
        draft_head: str | Path | Head | None = None,
        *,
        budget: int = 128,
        width: int = 7,
        depth: int | None = None,
        algorithm: str | Algorithm = "accum_logp",
        dtype: str = "auto",
        capacity: int | None = None,
        max_slots: int = MAX_SLOTS,
        implementation: str | None = None,
        ignore_config_keys: Collection[str] = (),
        allow_nonfinite: bool = False,
        compilation_cache: str | Path = "auto",
    ):
        """Loads the models, once all settings are known to be good and the device to be large enough.

        Args:
            target: A folder, a hub id, a loaded target, or "demo": the small embedded pair.
            draft_head: A folder, a hub id or a loaded head. None is the demo's own head for the demo, and
                plain decoding for any other target.
            budget: Most nodes of a tree, root included; 1 is plain decoding.
            width: Most children of a node.
            depth: Largest depth of a tree; None is all that the head drafts.
            algorithm: How trees are built: a name, or what `jetspec_jax.tree.get_algorithm` makes of one.
            dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU, float32 on a CPU. Loaded models keep
                theirs.
            capacity: Tokens of prompt and output that a slot can hold; None is 1024, or as many as a request
                needs where that is more. Raising it later compiles again.
            max_slots: Most prompts that decode at the same time.
            implementation: Of tree attention; None picks the best.
            ignore_config_keys: Unknown keys of either ``config.json`` that the caller vouches for as having
                no effect; one that is understood cannot be ignored.
            allow_nonfinite: Whether weights may be NaN or infinite, which decode to garbage.
            compilation_cache: Where compiled programs are kept for later processes, this whole process's:
                "auto", a folder, or "off". See `jetspec_jax.enable_compilation_cache`.

        Raises:
            FileNotFoundError: A checkpoint is not to be had.
            CheckpointError: A file of a checkpoint does not hold what it should.
            ValueError: A setting is not valid.
            DeviceMemoryError: The device cannot hold weights, stores and what a round needs beside them.
        """
        if target == "demo":
            target, draft_head = DEMO_TARGET, DEMO_DRAFT_HEAD if draft_head is None else draft_head
        reading = Source("", dtype, ignore_config_keys, allow_nonfinite)
        ours = target if isinstance(target, Target) else replace(reading, path_or_id=target)
        head: Head | Source | None = None
        if draft_head is not None:
            loaded = isinstance(draft_head, Head)
            head = draft_head if loaded else replace(reading, path_or_id=draft_head)
        resolved = resolve_dtype(dtype)
        unread: dict[str, ModelConfig | DraftHeadConfig] = {}
        if isinstance(ours, Target):
            config, stores_dtype = ours.config, ours.dtype
        else:
            config, stores_dtype = ours.target_config, resolved
            unread[TARGET_WEIGHTS] = config
        head_config = None
        if isinstance(head, Head):
            head_config = head.config
        elif head is not None:
            head_config = unread[HEAD_WEIGHTS] = head.head_config
        settings = TreeSettings(budget, width, depth, algorithm)
        settings.check(config, None if head_config is None else head_config.depth)
        self.settings = PLAIN if head_config is None else settings
        self._capacity, self._max_slots, self._implementation = capacity, max_slots, implementation
        slots_for(1, max_slots)
        plan = plan_engine(
            config,
            head_config,
            self.settings,
            stores_dtype,
            capacity=capacity,
            implementation=implementation,
        )
        # An engine that a loaded target keeps serves or makes room: the next one is checked when it is made.
        if not isinstance(ours, Target) or ours.keeper.engine is None:
            plan.check_memory(lambda: {name: weight_bytes(own, resolved) for name, own in unread.items()})
        enable_compilation_cache(compilation_cache)
        self.target = read_target(ours) if isinstance(ours, Source) else ours
        self.draft_head = read_draft_head(head, self.target) if isinstance(head, Source) else head

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        routing: Hints | Sequence[Hints | None] | None = None,
    ) -> list[Completion]:
        """Completes prompts, texts or token ids, in batches.

        Args:
            prompts: One text, or a list of texts and token-id lists.
            sampling_params: One for all prompts, or one for each.
            routing: What is known of the prompts, for tree algorithms that look at that: one mapping for all,
                or one for each, with any of "task", "mode" and "text".

        Raises:
            ValueError: A request cannot be served; nothing has been generated then.
            DeviceMemoryError: The device cannot hold as many slots, or as long ones; what worked before does.
        """
        texts: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        plan, requests = self._plan([self.encode(prompt) for prompt in texts], sampling_params, routing)
        if not requests:
            return []
        with self.target.keeper.lock:
            return complete(self._engine(plan), requests, self.target.tokenizer)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        routing: Hints | Sequence[Hints | None] | None = None,
        **template_arguments: object,
    ) -> list[Completion]:
        """Answers one conversation, or a list of them, in the form of the tokenizer's chat template.

        Args:
            messages: Messages with "role" and "content"; or several such lists.
            sampling_params: One for all conversations, or one for each.
            routing: As for `generate`.
            **template_arguments: Passed to the template, e.g. ``enable_thinking=False``.

        Raises:
            ValueError: The tokenizer has no chat template, the template refuses a conversation, or a request
                cannot be served; nothing has been generated then.
        """
        check_template_arguments(template_arguments)
        tokenizer = self._tokenizer()
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target's tokenizer has no chat template; use generate")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        chats = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        if not all(chats):
            raise ValueError("there are no messages to answer")
        prompts = [
            render_chat(
                tokenizer,
                chat,
                template_arguments,
                where=f"messages[{number}]" if several else "",
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
            for number, chat in enumerate(chats)
        ]
        return self.generate(prompts, sampling_params, routing=routing)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        routing: Hints | None = None,
    ) -> "Stream":
        """Completes one prompt piece by piece; the arguments are those of `generate`.

        Raises:
            ValueError: The request cannot be served.
            DeviceMemoryError: As for `generate`.
        """
        self._tokenizer()
        plan, [request] = self._plan([self.encode(prompt)], sampling_params, routing)
        with self.target.keeper.lock:
            engine = self._engine(plan)
            return Stream(self.target, engine, engine.admit(request))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer puts around a text."""
        if isinstance(prompt, str):
            return self._tokenizer().encode(prompt)
        if np.ndim(prompt) != 1:
            raise ValueError(f"a prompt must be a text or a list of token ids, not {prompt!r}")
        return list(prompt)

    def _tokenizer(self):
        if self.target.tokenizer is None:
            raise ValueError("the target has no tokenizer; pass token ids to generate")
        return self.target.tokenizer

    def _plan(
        self,
        prompts: list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        routing: Hints | Sequence[Hints | None] | None,
    ) -> tuple[EnginePlan, list[Request]]:
        return plan_requests(
            self.target,
            self.draft_head,
            self.settings,
            prompts,
            sampling_params,
            routing,
            max_slots=self._max_slots,
            capacity=self._capacity,
            implementation=self._implementation,
        )

    def _engine(self, plan: EnginePlan) -> Engine:
        return engine_for(self.target, plan, None if self.draft_head is None else self.draft_head.weights)


class Stream(Iterator[str]):
    """Pieces of text as they are accepted; what overshoots the end is discarded.

    A stream that is closed, left as a context, or dropped before its end frees its slot.

    Attributes:
        completion: The whole completion once the stream has ended, None before.
    """

    def __init__(self, target: Target, engine: Engine, request: Request):
        """Wraps a request that waits in the target's engine."""
        self.completion: Completion | None = None
        self._lock, self._request = target.keeper.lock, request
        self._engine: Engine | None = engine
        self._output, self._sent, self._closed = Output(request, target.tokenizer), 0, False

    def __enter__(self) -> "Stream":
        """The stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the request."""
        self.close()

    def __del__(self) -> None:
        """Marks the request; the engine's next batch takes it out. No device work in a finaliser."""
        self._request.abandoned = True

    def __next__(self) -> str:
        """The next piece of text, which is never empty."""
        while self.completion is None and not self._closed:
            with self._lock:
                # Others who decode with this engine serve the stream too.
                self._output.update()
                if self._output.finish_reason is None and self._engine is not None:
                    self._engine.step(STREAM_ROUNDS)
                    self._output.update()
            text = self._output.settled_text
            piece = text[self._sent :]
            self._sent = len(text)
            if self._output.finish_reason is not None:
                self.completion = self._output.completion()
                self.close()
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Ends the request; its slot and pages are free again."""
        with self._lock:
            self._closed = True
            if self._engine is not None:
                self._engine.cancel(self._request)
            self._engine = None  # its stores are the target's to keep or to free
