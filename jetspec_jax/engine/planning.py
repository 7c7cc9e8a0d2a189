"""The front door: what an engine and its requests need, checked before anything is done."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.arguments import check_type, shown
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.settings import TreeSettings, make_decoder
from jetspec_jax.device.groups import Meshes, describe_meshes
from jetspec_jax.device.memory import Bytes
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.agreement import asked_for, share
from jetspec_jax.engine.bad_words import check_choices_left, encode_bad_words, endings_of
from jetspec_jax.engine.budget_policy import MAX_ROUNDS
from jetspec_jax.engine.extras import NO_EXTRAS, Extras
from jetspec_jax.engine.grammars import matcher_for
from jetspec_jax.engine.memory import check_engine_memory, no_weights
from jetspec_jax.engine.pace import Slices
from jetspec_jax.engine.prompts import EncodedPrompt, Prompt, naming, read_prompt, read_prompts
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import (
    MAX_SLOTS,
    MOST_ROWS,
    PREFILL_TOKENS,
    EngineSize,
    chunks_for,
    default_capacity,
    powers,
    slots_for,
)
from jetspec_jax.sampling.params import SamplingParams, draw_seed
from jetspec_jax.tree import BUCKETS, USUAL_LEAST, Auto, Hints, algorithm_of, tree_buckets
from jetspec_jax.tree.routing import hints_of_each
from pallas_kernels.dispatch import gpu_problem

# Numbers of prompts, as vLLM has them: the request ids of requests that callers do not name.
_numbers = itertools.count()


@dataclass(frozen=True)
class EnginePlan:
    """All that an engine is, but for its weights.

    Attributes:
        decoder: Of the largest trees that it may build.
        size: How much it holds.
        dtype: Of the weights, and so of the stores.
        least_nodes: Of the smallest trees that "auto" may choose: the more slots decode, the smaller are
            those that pay.
        slices: How long dispatches are; None suits calls that nobody joins.
        extras: What its requests may want beside.
        led: Whether of several processes the first decides all, and the others follow it.
    """

    decoder: TreeDecoder
    size: EngineSize
    dtype: jnp.dtype
    least_nodes: int = USUAL_LEAST
    slices: Slices | None = None
    extras: Extras = NO_EXTRAS
    led: bool = False

    @property
    def auto(self) -> Auto | None:
        """The algorithm, where it chooses among the buckets up to the decoder's."""
        algorithm = algorithm_of(self.decoder.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.decoder.bucket > 1 else None

    @property
    def decoders(self) -> tuple[TreeDecoder, ...]:
        """Those that the engine chooses from: with "auto" one for each bucket up to the decoder's.

        One that stands has always plain decoding among them: a request may ask for no trees.
        """
        auto = self.auto
        if auto is None:
            plain = (replace(self.decoder, bucket=1),) if self.stands and self.decoder.bucket > 1 else ()
            return (*plain, self.decoder)
        plain = replace(self.decoder, bucket=1, algorithm=auto.shape)
        buckets = tree_buckets(self.decoder.bucket, self.least_nodes)
        trees = (
            replace(self.decoder, bucket=bucket, algorithm=auto.shape, observes=buckets) for bucket in buckets
        )
        return (plain, *trees)

    def check_memory(self, weights: Callable[[Mesh | None], Bytes] = no_weights) -> None:
        """Checks that its devices can hold it, beside weights that they do not hold yet.

        Args:
            weights: Those on one device of a mesh.

        Raises:
            DeviceMemoryError: It cannot. The message lists all parts, their sum, and what would fit.
        """
        check_engine_memory(self.decoder, self.size, self.dtype, self.extras, weights=weights)

    def on(self, mesh: Mesh | None) -> "EnginePlan":
        """The same engine on other devices."""
        if mesh == self.decoder.mesh:
            return self
        return replace(self, decoder=replace(self.decoder, mesh=mesh))

    def for_many(
        self,
        *,
        live: Sequence[int] | None = None,
        prefill_tokens: int | None = PREFILL_TOKENS,
        most_rows: int | None = MOST_ROWS,
        least_nodes: int = BUCKETS[1],
        slices: Slices | None = None,
        snapshots: int | None = None,
    ) -> "EnginePlan":
        """The same engine for requests that come and go at any time, of which many decode together.

        Args:
            live: Numbers of live slots that have programs, beside all; None is 1, 2, 4, ….
            prefill_tokens: Prompt tokens between two dispatches, at most; None is no bound.
            most_rows: Nodes of all live slots together, at most, of trees that are chosen; None is no bound.
            least_nodes: Of the smallest trees that "auto" may choose.
            slices: How long dispatches are; None is as `Slices` says.
            snapshots: Places for what slots keep beside pages, where the target has windows or recurrent
                layers: without any, requests to it share no beginnings. None is as many as slots.
        """
        own = powers(self.size.slots) if live is None else tuple(sorted(live))
        # Where there is nothing to choose, all slots together have the trees of one.
        most_rows = None if self.auto is None else most_rows
        size = replace(self.size, live=own, prefill_tokens=prefill_tokens, most_rows=most_rows)
        size = size.with_snapshots(snapshots)
        return replace(self, size=size, least_nodes=least_nodes, slices=slices or Slices())

    @property
    def stands(self) -> bool:
        """Whether its engine stays for requests that come and go, whatever their number."""
        return self.slices is not None

    def serves(self, other: "EnginePlan") -> bool:
        """Whether an engine of this plan does what one of the other would do; one that stands, any less."""
        mine, wanted = self.size, other.size
        if self.stands and not other.stands:
            same = mine.slots >= wanted.slots
        else:
            kept, asked = (
                (own.size.slots, own.size.chunks, own.size.snapshots, own.least_nodes)
                for own in (self, other)
            )
            same = kept == asked and self.slices == other.slices
        return (
            same
            and self.has_trees_of(other)
            and (self.dtype, self.led) == (other.dtype, other.led)
            and mine.capacity >= wanted.capacity
            and mine.num_pages >= wanted.num_pages
        )

    def takes(self, other: "EnginePlan") -> bool:
        """Whether requests for the other's engine may wait for slots of this one's, which stands."""
        same = (self.dtype, self.led) == (other.dtype, other.led)
        return self.stands and same and self.has_trees_of(other) and self.size.capacity >= other.size.capacity

    def has_trees_of(self, other: "EnginePlan") -> bool:
        """Whether the decoders are equal; one that stands may choose among sizes of the other's trees."""
        mine, wanted = self.decoder, other.decoder
        if self.stands and not other.stands:
            mine, wanted = _as_shaped(mine), _as_shaped(wanted)
        return mine == wanted


def _as_shaped(decoder: TreeDecoder) -> TreeDecoder:
    """A decoder of trees as they are shaped, whoever chooses their size."""
    algorithm = algorithm_of(decoder.algorithm)
    return replace(decoder, algorithm=algorithm.shape if isinstance(algorithm, Auto) else algorithm)


def plan_engine(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    dtype: jnp.dtype,
    *,
    slots: int = 1,
    capacity: int | None = None,
    num_pages: int | None = None,
    chunks: tuple[tuple[int, int], ...] | None = None,
    proposer: Proposer | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> EnginePlan:
    """An engine for some trees.

    Args:
        target: The target.
        head: A draft head; None decodes plainly unless a proposer is given.
        settings: The trees.
        dtype: Of the weights.
        slots: Requests that decode at the same time.
        capacity: Tokens that a slot can hold, prompt and output together; None is the usual number.
        num_pages: Pages of all slots together; None is enough for every slot to be full.
        chunks: Shapes of the forwards of prompts, see `EngineSize`; None is the usual ones of the device.
        proposer: A proposer other than the head's.
        implementation: Of tree attention; None picks the best.
        mesh: The devices that share the models; None is one.

    Raises:
        ValueError: The head does not fit, a setting is out of its range, or the mesh cannot split a model.
    """
    decoder = make_decoder(
        target, head, settings, proposer=proposer, implementation=implementation, mesh=mesh
    )
    decoder = replace(decoder, max_rounds=MAX_ROUNDS)
    if chunks is None:
        # Plain XLA makes the scores of all rows at once.
        chunks = chunks_for(slots, gpu=implementation != "xla" and gpu_problem() is None)
    return EnginePlan(decoder, EngineSize.of(target, slots, capacity, num_pages, chunks), dtype)


def plan_requests(
    target: Target,
    head: Head | None,
    settings: TreeSettings,
    prompts: Prompt | Iterable[Prompt | EncodedPrompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    routing: Hints | Sequence[Hints | None] | None = None,
    *,
    max_slots: int = MAX_SLOTS,
    capacity: int | None = None,
    proposer: Proposer | None = None,
    implementation: str | None = None,
    together: bool = True,
) -> tuple[EnginePlan, list[Request]]:
    """Requests, and the engine that serves them together, or their share with each copy of the target.

    Args:
        target: The target.
        head: A draft head; None decodes plainly unless a proposer is given.
        settings: The trees.
        prompts: One prompt in any form, or several.
        sampling_params: One for all prompts, or one for each; ``n`` of them makes n requests of a prompt.
        routing: What is known of the prompts, for all or for each: see `jetspec_jax.generate_tree`.
        max_slots: Most prompts that decode at the same time, with each copy of the target.
        capacity: Tokens that a slot can hold; None is as many as the requests need, or the usual number.
        proposer: A proposer other than the head's.
        implementation: Of tree attention; None picks the best.
        together: Whether all processes that share the target make this call, and serve the requests.

    Returns:
        The engine, on the target's own devices, and the requests.

    Raises:
        TypeError: Something is of a wrong type.
        ValueError: A setting is out of its range, the head does not fit, or a request cannot be served; or
            several processes ask for different things.
    """
    check_models(target, head)
    options = {
        "max_slots": max_slots,
        "capacity": capacity,
        "proposer": proposer,
        "implementation": implementation,
    }
    plan = functools.partial(
        _plan_requests, target, head, settings, prompts, sampling_params, routing, **options
    )
    if together and spans(target.mesh):
        return share(plan)
    planned, requests, _ = plan()
    return planned, requests


def _plan_requests(
    target: Target,
    head: Head | None,
    settings: TreeSettings,
    prompts: Prompt | Iterable[Prompt | EncodedPrompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    routing: Hints | Sequence[Hints | None] | None,
    *,
    max_slots: int,
    capacity: int | None,
    proposer: Proposer | None,
    implementation: str | None,
) -> tuple[EnginePlan, list[Request], Callable[[], dict[str, Any]]]:
    """As `plan_requests`; also returns what tells, by name, what was asked for."""
    read = read_prompts(target, prompts)
    params = _of_each(sampling_params, len(read))
    hints = hints_of_each(routing, len(read), "prompts")
    asked = []
    for number, (prompt, own) in enumerate(zip(read, params, strict=True)):
        with naming(f"prompts[{number}]" if len(read) > 1 else ""):
            asked.append(check_request(target, prompt, own, capacity=capacity))
    need = max((one.tokens for one in asked), default=0)
    plan = plan_engine(
        target.config,
        None if head is None else head.config,
        settings,
        target.dtype,
        slots=slots_for(-(-sum(one.params.n for one in asked) // len(target.meshes)), max_slots),
        capacity=default_capacity(target.config, need) if capacity is None else capacity,
        proposer=proposer,
        implementation=implementation,
        mesh=target.mesh,
    )
    requests = [
        make_request(
            target, plan.decoder, settings, one.prompt, child, hint, index=index, request_id=str(number)
        )
        for one, hint in zip(asked, hints, strict=True)
        for number in itertools.islice(_numbers, 1)
        for index, child in enumerate(one.params.each())
    ]
    plan = replace(plan, extras=Extras.of(requests))
    checked = [one.params for one in asked]
    stops = [sorted(request.stop_ids) for request in requests]
    return plan, requests, functools.partial(asked_for, read, checked, hints, settings, plan.size, stops)


def read_single(
    target: Target, prompt: Prompt | EncodedPrompt, sampling_params: SamplingParams | None
) -> EncodedPrompt:
    """The prompt of a request that is followed on its way: one prompt with one completion.

    Raises:
        TypeError: It is no prompt.
        ValueError: Several completions are asked for, or as `read_prompt`.
    """
    check_models(target, None)
    if isinstance(sampling_params, SamplingParams) and sampling_params.n != 1:
        raise ValueError(f"n must be 1 to follow one completion, not {sampling_params.n}; use generate")
    return read_prompt(target, prompt)


def make_request(
    target: Target,
    decoder: TreeDecoder,
    settings: TreeSettings,
    prompt: EncodedPrompt,
    params: SamplingParams,
    hints: Hints | None = None,
    *,
    index: int = 0,
    request_id: str = "",
) -> Request:
    """A request of one completion, number ``index`` of its prompt; draws a seed if it has none."""
    stop_ids = stop_ids_of(target, params)
    if params.seed is None:
        params = replace(params, seed=draw_seed())
    return Request(
        prompt.ids,
        params,
        stop_ids,
        settings.budget,
        decoder.depth if settings.depth is None else settings.depth,
        tuple((hints or {}).items()),
        text=prompt.text,
        index=index,
        request_id=request_id,
        bad_words=encode_bad_words(target, params.bad_words),
        endings=endings_of(target, params),
        matcher=matcher_for(target, params, stop_ids),
    )


def stop_ids_of(target: Target, params: SamplingParams) -> frozenset[int]:
    """All tokens that end a request."""
    return frozenset((*(params.stop_token_ids or ()), *(() if params.ignore_eos else target.eos_token_ids)))


@dataclass(frozen=True)
class CheckedRequest:
    """What was asked for, known to be possible.

    Attributes:
        prompt: Its prompt.
        params: Its parameters, which name `max_tokens`.
        max_tokens: Most tokens to generate.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    max_tokens: int

    @property
    def tokens(self) -> int:
        """Of prompt and output together, at most."""
        return len(self.prompt.ids) + self.max_tokens


def check_request(
    target: Target, prompt: Prompt | EncodedPrompt, params: SamplingParams, *, capacity: int | None = None
) -> CheckedRequest:
    """Checks a request before anything is done for it.

    Args:
        target: The target.
        prompt: The prompt, in any form.
        params: How it is sampled and when it stops.
        capacity: Tokens that a slot can hold; None is the target's whole context.

    Raises:
        ImportError: It has a grammar, and llguidance is not installed.
        TypeError: Something is of a wrong type.
        ValueError: What is wrong with it.
    """
    check_type("sampling_params", params, SamplingParams, "SamplingParams")
    config, read = target.config, read_prompt(target, prompt)
    check_choices_left(target, params)
    limit = min(config.max_position_embeddings, capacity or config.max_position_embeddings)
    count, room = len(read.ids), limit - len(read.ids)
    if room < 1:
        raise ValueError(
            f"the prompt is longer than the context: {count} prompt tokens leave no room for an output in "
            f"the context limit of {limit}"
        )
    most = room if params.max_tokens is None else params.max_tokens
    if most > room:
        raise ValueError(
            f"{count} prompt tokens plus max_tokens={shown(most)} lie beyond the context limit of {limit}; "
            f"max_tokens could be at most {room}, or None to go on to the limit"
        )
    if params.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the target has none; use stop_token_ids")
    if params.min_tokens > most:
        raise ValueError(
            f"min_tokens={params.min_tokens} lies beyond the {most} tokens that the context limit of {limit} "
            f"leaves after {count} prompt tokens"
        )
    matcher_for(target, params, stop_ids_of(target, params))  # while it can still be said whose grammar it is
    return CheckedRequest(read, replace(params, max_tokens=most), most)


def check_models(target: object, head: object) -> None:
    """Checks the kinds, the devices and the process of models.

    Raises:
        TypeError: What is no loaded target, or neither None nor a loaded head.
        ValueError: They lie on different devices.
        RuntimeError: This process is a fork of the one that loaded them.
    """
    check_type("the target", target, Target, "a Target, as load_target returns it")
    check_type("the draft head", head, Head | None, "a Head, as load_draft_head returns it")
    if isinstance(target, Target):
        target.keeper.check_process()
        if isinstance(head, Head):
            check_places(target.meshes, head.meshes)


def check_places(target: Meshes, head: Meshes) -> None:
    """Raises ValueError for a draft head that does not lie where its target does."""
    if head != target:
        raise ValueError(
            f"the draft head lies on {describe_meshes(head)} and the target on {describe_meshes(target)}: "
            "load both with the same mesh"
        )


def _of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One set of sampling parameters for each of ``count`` prompts."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if isinstance(sampling_params, str) or not isinstance(sampling_params, Sequence):
        raise TypeError(f"sampling_params must be SamplingParams or a list, not {shown(sampling_params)}")
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling_params for {count} prompts")
    return list(sampling_params)
