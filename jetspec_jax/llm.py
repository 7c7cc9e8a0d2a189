"""`LLM`: completes texts and chats."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.arguments import (
    Complaints,
    check_flag,
    check_integer,
    check_type,
    either,
    refuse_unknown,
    refusing_attributes,
    shown,
)
from jetspec_jax.checkpoint.chat_template import (
    Chat,
    Ending,
    check_template_arguments,
    read_chat_template,
    read_chats,
)
from jetspec_jax.checkpoint.loading import Head, Target, read_draft_head, read_target
from jetspec_jax.checkpoint.packing import with_activations, with_storage
from jetspec_jax.checkpoint.pairs import default_draft_head, draft_head_at
from jetspec_jax.checkpoint.source import AUTO, Source, resolve_dtype
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.proposer import (
    DraftHeadProposer,
    Proposer,
    check_fits,
    check_given,
    prepared_bytes,
    selected_of,
)
from jetspec_jax.decode.settings import PLAIN, TreeSettings, fastest_settings
from jetspec_jax.demo import DEMO
from jetspec_jax.device.compilation_cache import enable_compilation_cache
from jetspec_jax.device.groups import Meshes, describe_meshes, meshes_for, say_unused
from jetspec_jax.device.memory import HEAD_WEIGHTS, TARGET_WEIGHTS, weight_bytes
from jetspec_jax.device.mesh import without_mesh
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.admission import check_models, check_places, check_single, make_requests
from jetspec_jax.engine.batch import Kind
from jetspec_jax.engine.engines import Engines, Stream, complete
from jetspec_jax.engine.plan import EnginePlan, check_engine_memory, plan_engine
from jetspec_jax.engine.prompts import Prompt, encode_chat, naming, read_prompt, templated
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import MAX_SLOTS
from jetspec_jax.engine.worker import check_alike
from jetspec_jax.progress import terminal_bar
from jetspec_jax.request_output import RequestOutput, by_prompt
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import Algorithm
from jetspec_jax.tree.routing import ROUTING_INSTEAD
from jetspec_jax.vllm_names import ATTRIBUTES, CALLS, ENGINE

_log = logging.getLogger("jetspec_jax")

PLAIN_NOTICE = (
    "decoding plainly; on a CPU small trees are usually faster at temperature 0: budget=8 or --budget 8"
)


class _Unnamed(str):
    __slots__ = ()


#: The demo pair, if no target is given: an object of its own, to tell it from an explicit "demo".
UNNAMED = _Unnamed(DEMO)


@refusing_attributes(ATTRIBUTES)
class LLM:
    """A target, its draft head, and their tokenizer.

    Example::

        llm = LLM()  # the embedded demo pair
        [completion] = llm.generate(["def copy(self):"], SamplingParams(max_tokens=64))
    """

    @without_mesh
    def __init__(
        self,
        target: str | Path | Target = UNNAMED,
        draft_head: str | Path | Head | None = None,
        *,
        model: str | Path | Target = UNNAMED,
        budget: int | None = None,
        width: int | None = None,
        depth: int | None = None,
        algorithm: str | Algorithm | None = None,
        candidates: int | None = None,
        dtype: Any = "auto",
        capacity: int | None = None,
        max_model_len: int | None = None,
        max_slots: int | None = None,
        max_num_seqs: int | None = None,
        implementation: str | None = None,
        ignore_config_keys: Collection[str] = (),
        allow_nonfinite: bool = False,
        tokenizer: str | Path | None = None,
        chat_template: str | Path | None = None,
        mxfp4: str = AUTO,
        fp8_activations: bool | None = None,
        compilation_cache: str | Path = "auto",
        proposer: Proposer | None = None,
        proposer_weights: Any = None,
        mesh: Mesh | None = None,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_parallel_size: int = 1,
        **unknown: object,
    ):
        """Checks all settings and the device memory, then loads the models.

        If you set no tree option (budget, width, depth, algorithm, candidates), the default tree is used on a
        GPU, and plain decoding on a CPU, which is logged once: see "On a CPU" in docs/algorithms.md.

        Args:
            target: A folder, a GGUF file, a hub id, a loaded target, or the name of a pair: "demo" (the
                default) for the small embedded pair, "smollm2" for SmolLM2-135M-Instruct, whose weights are
                installed separately.
            draft_head: A folder, a hub id, a loaded head, or the name of a pair. None is the pair's own head
                if the target is a pair, and plain decoding for any other target.
            model: vLLM's name for the target.
            budget: Most nodes of a tree, root included; 1 is plain decoding, None is 128.
            width: Most children of a node; None is the candidates, or without them the algorithm's default.
            depth: Largest depth of a tree; None is all that the head drafts.
            algorithm: Tree algorithm: a name, or an algorithm with options from
                `jetspec_jax.tree.get_algorithm`; None is `jetspec_jax.tree.DEFAULT_ALGORITHM`.
            candidates: Number of candidate tokens per draft row; None is the width, or without one the
                algorithm's default. With a selector it is at least that default, and the number of the
                selector's training.
            dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 on a GPU, float32 on a CPU. Loaded
                models keep theirs.
            capacity: Tokens of prompt and output per slot; None is 1024, or more if a request needs more.
                A later, larger need compiles again. If it is given, each of ``max_slots`` slots has room for
                so many: for one long prompt at a time set ``max_slots=1``.
            max_model_len: vLLM's name for the capacity.
            max_slots: Most prompts that decode at the same time, per copy of the models, if the device memory
                allows as many; None is 8.
            max_num_seqs: vLLM's name for ``max_slots``.
            implementation: Tree attention implementation; None picks the best.
            ignore_config_keys: Unknown keys of either ``config.json`` that the caller knows to have no
                effect; known keys cannot be ignored.
            allow_nonfinite: Whether weights may be NaN or infinite, which decode to garbage.
            tokenizer: A folder, a GGUF file or a hub id whose tokenizer replaces the target's own.
            chat_template: A file, "chatml-tools" (ChatML with tools) or a Jinja text, which replaces the
                tokenizer's chat template; a value with braces or several lines is a text.
            mxfp4: Whether experts in MXFP4 stay "packed" on the devices or are "widened" on loading; "auto"
                is the faster form if it fits, else the smaller one. Loaded targets keep theirs.
            fp8_activations: Whether products with FP8 weights also quantise their input to FP8; None is
                decided as by `jetspec_jax.load_target`. Loaded models keep theirs.
            compilation_cache: Folder of compiled programs for later processes, for this whole process:
                "auto", a folder, or "off". See `jetspec_jax.enable_compilation_cache`.
            proposer: A source of drafts in place of a draft head, see `jetspec_jax.Proposer`.
            proposer_weights: Its parameters; on a mesh, in shards of its ``weight_specs``.
            mesh: The devices that share the models, a mesh with the axes "expert" and "tensor", or one of
                them. Without it the next three sizes select the first devices; if they are 1, one device
                decodes. Loaded models stay on their devices.
            tensor_parallel_size: Shards of every expert; other weights have this number times the next.
            expert_parallel_size: Groups of whole experts.
            data_parallel_size: Copies of the models, each on its own devices, among which requests are dealt.
            **unknown: Refused; for arguments of vLLM the error names the equivalent.

        Raises:
            FileNotFoundError: A checkpoint or a template cannot be found or fetched.
            TypeError: A setting has a wrong type.
            CheckpointError: A checkpoint's file is not valid.
            ValueError: A setting is not valid.
            DeviceMemoryError: The device cannot hold weights, stores and a round's workspace.
        """
        refuse_unknown(LLM, unknown, ENGINE)
        capacity = either("capacity", capacity, "max_model_len", max_model_len)
        max_slots = either("max_slots", max_slots, "max_num_seqs", max_num_seqs)
        max_slots = MAX_SLOTS if max_slots is None else max_slots
        check_type("compilation_cache", compilation_cache, str | Path, 'a folder, "auto" or "off"')
        check_given(proposer, proposer_weights)
        proposer_weights = jax.tree.map(jnp.asarray, proposer_weights)
        resolved = resolve_dtype(dtype)
        # What is read: the target and the head, unless they are loaded.
        reading = Source(
            "", dtype, ignore_config_keys, allow_nonfinite, mxfp4=mxfp4, fp8_activations=fp8_activations
        )
        target = _target_of(target, model)
        ours = _source_of_target(target, reading, tokenizer, chat_template)
        if draft_head is None and proposer is None:
            draft_head = default_draft_head(target)
        head = _source_of_head(draft_head, reading)
        config = ours.config if isinstance(ours, Target) else ours.target_config
        head_config = head.head_config if isinstance(head, Source) else head and head.config
        # The trees.
        drafts = proposer if head_config is None else DraftHeadProposer(head_config)
        tree = {"budget": budget, "width": width, "depth": depth}
        tree |= {"algorithm": algorithm, "candidates": candidates}
        options: dict[str, Any] = {name: value for name, value in tree.items() if value is not None}
        settings = TreeSettings(**options) if options else fastest_settings()
        # Logged after the check of the first request, so that bad input shows its error alone.
        self._notice = None if options or settings != PLAIN or drafts is None else PLAIN_NOTICE
        settings = settings.for_selected(selected_of(drafts))
        settings.check(config, None if drafts is None else drafts.depth)
        self.settings = PLAIN if drafts is None else settings
        # The devices, and whether they can hold everything.
        sizes = tensor_parallel_size, expert_parallel_size, data_parallel_size
        divided = config if isinstance(ours, Target) else ours.partition_config
        meshes = _meshes_of(ours, head, divided, mesh, *sizes)
        check_fits(proposer, config, len(meshes))
        if isinstance(ours, Source):
            ours = with_storage(ours, *meshes)
            config = ours.target_config
        if isinstance(head, Source):
            head = with_activations(head, *meshes)
            head_config = head.head_config
        self._capacity = capacity
        plan = plan_engine(
            config,
            head_config,
            self.settings,
            ours.dtype if isinstance(ours, Target) else resolved,
            slots=max_slots,
            capacity=capacity,
            proposer=proposer,
            implementation=implementation,
            mesh=meshes[0],
        )
        check_alike(plan)
        _check_memory(plan, meshes, ours, head, proposer_weights)
        enable_compilation_cache(compilation_cache, together=spans(meshes[0]))
        if mesh is None and isinstance(ours, Source):
            say_unused(meshes)
        self.target = read_target(ours, *meshes) if isinstance(ours, Source) else ours
        self.draft_head = read_draft_head(head, self.target) if isinstance(head, Source) else head
        models = self.target, self.draft_head
        longer = capacity is None
        self.engines = Engines(*models, plan, longer_slots=longer, proposer_weights=proposer_weights)
        if self.engines.workers.there:
            self.engines.fit()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fails all requests, and frees the engines' stores; the models stay loaded."""
        self.engines.close()

    def follow(self) -> None:
        """Runs what process 0 runs, until it closes or ends; for all other processes that share the models.

        It blocks, and no other call may use the models meanwhile.

        Raises:
            ValueError: This is process 0, or it shares its models with no other process.
            OutOfStep: Process 0 does something else.
        """
        self.engines.follow()

    def __repr__(self) -> str:
        """The models, their devices, and the trees."""
        tree = self.settings
        trees = f"budget={tree.budget}" if tree.budget > 1 else "plain decoding"
        return f"LLM({self.target!r}, {self.draft_head!r}, {trees})"

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        budget: int | None = None,
        **unknown: object,
    ) -> list[RequestOutput]:
        """Completes prompts, texts or token ids, in batches.

        Args:
            prompts: One prompt or several: each a text, a list of token ids, ``{"prompt": text}`` or
                ``{"prompt_token_ids": ids}``.
            sampling_params: One for all prompts, or one for each.
            use_tqdm: Whether to show a progress bar in long calls on a terminal; or a function that makes a
                bar, called like tqdm.
            budget: Most nodes of these trees, root included, at most the LLM's, which None means; 1 is plain
                decoding.
            **unknown: Refused: sampling settings go into ``sampling_params``.

        Returns:
            One output for each prompt, in their order, with its ``n`` completions.

        Raises:
            TypeError: A prompt or a setting has a wrong type, or is unknown.
            ValueError: A request cannot be served; then nothing has been generated.
            DeviceMemoryError: The device cannot hold as long slots; earlier calls still work.
            RuntimeError: The LLM is closed.
        """
        refuse_keywords(self.generate, unknown)
        if prompts is None:
            raise TypeError("generate needs prompts: a text, token ids, or a list of these")
        return self._complete(prompts, sampling_params, use_tqdm, budget)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        budget: int | None = None,
        **unknown: object,
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of them, in the form of the tokenizer's chat template.

        Args:
            messages: Messages with "role" and "content", a text or a list of parts of type text; or several
                such lists.
            sampling_params: One for all conversations, or one for each.
            use_tqdm: As for `generate`.
            add_generation_prompt: Whether the prompt ends with the beginning of an answer; None is the
                opposite of ``continue_final_message``.
            continue_final_message: Whether the prompt ends with the content of the last message, an
                assistant's, without an end mark, so that the model continues it. The completion has only the
                new text. None is the opposite of ``add_generation_prompt``, if the last message can be
                continued. With both False the last message keeps the end mark that the template writes.
            chat_template_kwargs: Passed to the template, as ``{"enable_thinking": False}``.
            budget: As for `generate`.
            **unknown: Refused, as by `generate`.

        Raises:
            TypeError: A message or a setting has a wrong type, or is unknown.
            ValueError: The tokenizer has no chat template, the template refuses a conversation, a message
                cannot be continued, or a request cannot be served; then nothing has been generated.
            DeviceMemoryError: As for `generate`.
        """
        refuse_keywords(self.chat, unknown)
        ending = Ending.of(add_generation_prompt, continue_final_message)
        arguments = {} if chat_template_kwargs is None else chat_template_kwargs
        check_type("chat_template_kwargs", arguments, Mapping, "a mapping of names to values")
        check_template_arguments(arguments)
        templated(self.target)
        prompts, chats = [], read_chats(messages)
        for number, chat in enumerate(chats):
            with naming(f"messages[{number}]" if len(chats) > 1 else ""):
                prompts.append(encode_chat(self.target, chat, arguments, ending))
        return self._complete(prompts, sampling_params, use_tqdm, budget)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        budget: int | None = None,
        **unknown: object,
    ) -> Stream:
        """Completes one prompt piece by piece; the arguments are those of `generate`.

        Raises:
            TypeError: The prompt or a setting has a wrong type, or is unknown.
            ValueError: The request cannot be served, or ``n`` is not 1.
            DeviceMemoryError: As for `generate`.
        """
        refuse_keywords(self.stream, unknown)
        self.get_tokenizer()
        check_single(sampling_params)
        [request] = self._requests([prompt], sampling_params, budget)
        return Stream(self.engines, request, self.target.tokenizer)

    @without_mesh
    def warm_up(
        self,
        num_prompts: int | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        background: bool = False,
    ) -> None:
        """Compiles the programs of later calls, with a progress bar on a terminal.

        Afterwards nothing compiles, except for requests beyond the capacity, or with features that
        ``sampling_params`` does not use. Requests are served meanwhile.

        Args:
            num_prompts: Number of completions per call; None compiles for any number.
            sampling_params: Parameters like those of later calls, if they use masks, biases, penalties,
                log-probabilities or structured outputs: the programs of all combinations are compiled too.
            background: Whether to return as soon as any request can be served, in a larger shape than it
                needs; a later call without this waits for the others. Several processes that share the models
                compile everything first.

        Raises:
            TypeError: A value has a wrong type.
            ValueError: The number is less than 1, or the parameters cannot be served.
            DeviceMemoryError: The device cannot hold the engine.
            Exception: An error of the engine or the compiler.
        """
        copies, count = len(self.target.meshes), None
        if num_prompts is not None:
            count = -(-check_integer("num_prompts", num_prompts, 1) // copies)
        short = kinds_to_compile(sampling_params)
        wants = sampling_params or SamplingParams()
        scores = wants.prompt_logprobs is not None
        self.engines.warm_up(Kind.of(wants).parts, count=count, scores=scores, background=background)
        # Short requests compile the other programs and allocate the arrays. The last token of a prompt is the
        # first anchor, the tokens before it are prefilled.
        prompt = [0] * min(2, self.engines.plan.size.capacity - 1)
        for params in short[:1] if background else short:
            self._complete([prompt] * copies, params, use_tqdm=False)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache, between two rounds; True when it is done. Running requests go on.

        Raises:
            RuntimeError: The LLM is closed.
        """
        for engine in self.engines.engines():
            engine.run(lambda engine=engine: engine.scheduler.pool.forget())
        return True

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, with the tokenizer's special tokens around a text.

        Unlike vLLM's method of this name it runs no model and pools nothing: `jetspec_jax.hidden_states`
        gives states to pool.

        Raises:
            TypeError: It is not a prompt.
            ValueError: It is empty, cannot be encoded, or has a token outside the vocabulary.
        """
        return read_prompt(self.target, prompt).ids.tolist()

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, a fast transformers tokenizer.

        Raises:
            ValueError: The target has none.
        """
        if self.target.tokenizer is None:
            raise ValueError("the target has no tokenizer; pass token ids to generate")
        return self.target.tokenizer

    def _complete(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        budget: int | None = None,
    ) -> list[RequestOutput]:
        bar = _bar(use_tqdm)
        requests = self._requests(prompts, sampling_params, budget)
        return by_prompt(complete(self.engines, requests, self.target.tokenizer, bar))

    def _requests(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        budget: int | None,
    ) -> list[Request]:
        settings, plan = self.settings, self.engines.plan
        self.engines.check_open()
        check_models(self.target, self.draft_head)
        if budget is not None:
            settings = replace(settings, budget=check_integer("budget", budget, 1, settings.budget))
        requests = make_requests(
            self.target, plan, settings, prompts, sampling_params, capacity=self._capacity
        )
        if self._notice is not None:
            _log.warning(self._notice)
            self._notice = None
        return requests


def kinds_to_compile(sampling_params: SamplingParams | None) -> list[SamplingParams]:
    """Short requests that together run all kinds of rounds that requests with these parameters need.

    Raises:
        TypeError: They are not sampling parameters.
    """
    check_type("sampling_params", sampling_params, SamplingParams | None, "SamplingParams or None")
    short = SamplingParams(max_tokens=1, ignore_eos=True)
    if sampling_params is None or not sampling_params.wants_more:
        return [short]
    tokens = {"max_tokens": 1, "min_tokens": min(sampling_params.min_tokens, 1)}
    ignore_eos = sampling_params.structured_outputs is None  # a form may end its text
    return [short, replace(sampling_params, **tokens, ignore_eos=ignore_eos, n=1, stop=())]


def _target_of(target: str | Path | Target, model: str | Path | Target) -> str | Path | Target:
    """The target, from the two arguments for it."""
    if target is not UNNAMED and model is not UNNAMED:
        raise ValueError("give the target once: model is an alias of target")
    given = target if model is UNNAMED else model
    check_type("the target", given, str | Path | Target, "a folder, a hub id or a Target")
    return given


def _source_of_target(
    target: str | Path | Target, reading: Source, tokenizer: str | Path | None, template: str | Path | None
) -> Target | Source:
    """The target if it is loaded, or from where it is read; ValueError for settings that have no effect."""
    text = None if template is None else read_chat_template(template)
    if not isinstance(target, Target):
        return replace(reading, path_or_id=target, tokenizer=tokenizer, chat_template=text)
    for name, value in (("tokenizer", tokenizer), ("chat_template", text)):
        if value is not None:
            raise ValueError(
                f"{name} has no effect on a target that is loaded already: give it to load_target"
            )
    return target


def _source_of_head(head: str | Path | Head | None, reading: Source) -> Head | Source | None:
    """The head if it is loaded, or from where it is read."""
    check_type("draft_head", head, str | Path | Head | None, "a folder, a hub id, a Head or None")
    if isinstance(head, Head):
        if not reading.allow_nonfinite:
            head.check_finite()
        return head
    return None if head is None else replace(reading, path_or_id=draft_head_at(head))


def _check_memory(
    plan: EnginePlan,
    meshes: Meshes,
    target: Target | Source,
    head: Head | Source | None,
    proposer_weights: Any,
) -> None:
    """Raises DeviceMemoryError unless each mesh can hold an engine of one slot and what is not loaded yet."""
    unread: dict[str, tuple[ModelConfig | DraftHeadConfig, Any]] = {}
    if isinstance(target, Source):
        unread[TARGET_WEIGHTS] = target.target_config, resolve_dtype(target.dtype)
    if isinstance(head, Source):
        unread[HEAD_WEIGHTS] = head.head_config, resolve_dtype(head.dtype)
    prepared, proposer = {}, plan.decoder.proposer
    if proposer_weights is not None and proposer is not None and meshes[0] is None:  # on a mesh, in rounds
        prepared["prepared weights of the proposer"] = prepared_bytes(proposer, proposer_weights)
    alone = replace(plan, size=plan.size.with_slots(1))  # an engine has the slots that fit
    for group in meshes:
        check_engine_memory(
            alone.on(group),
            lambda mesh: prepared | {name: weight_bytes(*kind, mesh) for name, kind in unread.items()},
        )


def _meshes_of(
    target: Target | Source,
    head: Head | Source | None,
    config: ModelConfig,
    mesh: Mesh | None,
    tensor_parallel_size: int,
    expert_parallel_size: int,
    data_parallel_size: int,
) -> Meshes:
    """The devices of the models.

    Raises:
        TypeError: As `meshes_for`.
        ValueError: As `meshes_for`, or a loaded model is on other devices.
    """
    complaints = Complaints()
    meshes = target.meshes if isinstance(target, Target) else None
    with complaints:
        asked = meshes_for(
            config,
            mesh=mesh,
            tensor_parallel_size=tensor_parallel_size,
            expert_parallel_size=expert_parallel_size,
            data_parallel_size=data_parallel_size,
        )
        if meshes is not None and asked not in (meshes, (None,)):
            raise ValueError(
                f"the loaded target lies on {describe_meshes(meshes)}, and the arguments ask for "
                f"{describe_meshes(asked)}: load it there, or omit the mesh and the sizes"
            )
        meshes = meshes or asked
    if meshes is not None and isinstance(head, Head):
        with complaints:
            check_places(meshes, head.meshes)
    complaints.raise_all()
    assert meshes is not None
    return meshes


def _bar(use_tqdm: bool | Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that makes a progress bar; None for no bar."""
    if callable(use_tqdm):
        return use_tqdm
    return terminal_bar if check_flag("use_tqdm", use_tqdm) else None


_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


def refuse_keywords(call: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    """Raises TypeError for unknown keywords of `LLM.generate` and similar methods, with the right place."""
    template = "arguments of the template go into chat_template_kwargs={…}"
    instead = dict.fromkeys(unknown, template) if call.__name__ == "chat" else {}
    instead |= (
        CALLS
        | {"routing": ROUTING_INSTEAD}
        | {
            name: f"put it into SamplingParams: {call.__name__}(…, SamplingParams({name}={shown(value)}))"
            for name, value in unknown.items()
            if name in _SAMPLING
        }
    )
    refuse_unknown(call, unknown, instead)
