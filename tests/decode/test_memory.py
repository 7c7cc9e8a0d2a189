"""Too little device memory is an error before anything is read or allocated, and leaves what there was."""

import dataclasses
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

from jetspec_jax import LLM, DeviceMemoryError, SamplingParams, generate, load_draft_head, load_target
from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.checkpoint import loading as checkpoint
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.settings import TreeSettings, make_decoder
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.device import memory, partition
from jetspec_jax.device.memory import array_bytes, weight_bytes
from jetspec_jax.engine import runner
from jetspec_jax.engine.plan import EnginePlan, check_engine_memory, empty_state, extra_bytes, workspace_bytes
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.models import abstract, weights_of
from tests.decode.tiny import (
    HYBRID,
    TINY,
    TinyEngine,
    head_config,
    random_head,
    random_target,
    with_mlp,
    with_windows,
    word_tokenizer,
)
from tests.marks import wide
from tests.meshes import mesh_of

pytestmark = pytest.mark.usefixtures("optimised")

CONFIG = with_windows(TINY, None)
FLOAT32 = jnp.dtype(jnp.float32)
SHORT = SamplingParams(max_tokens=4)
EXTRAS = ("adjustments of", "log-probabilities of", "log-probabilities of a prompt")
PARTS = ("stores of", "workspace for", *EXTRAS, "margin")


@pytest.fixture
def device(monkeypatch):
    """Says how much memory the device has free; None is a device that does not say."""

    def has(free):
        monkeypatch.setattr(memory, "free_bytes", lambda mesh=None: free)

    return has


@pytest.fixture
def nothing_is_read(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("weights were read before all was checked")

    monkeypatch.setattr(checkpoint, "read_weights", fail)


def needs(decoder, size, **settings):
    """Bytes of every part of an engine, as an error lists them."""
    seen = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda mesh=None: -(2**60))
        patch.setattr(memory, "_gib", lambda count: f"{count} GiB")
        with pytest.raises(DeviceMemoryError) as info:
            check_engine_memory(EnginePlan(decoder, size, FLOAT32), **settings)
    for name, count in re.findall(r"^  (.*\S)\s+(\d+) GiB$", str(info.value), re.MULTILINE):
        seen[name] = int(count)
    return seen


def total(decoder, size, **settings):
    return sum(needs(decoder, size, **settings).values())


def assert_lists(lines, parts):
    for line, part in zip(lines, parts, strict=True):
        assert line.startswith(f"  {part}")
        assert line.endswith(" GiB")


def decoder_for(config, budget):
    return make_decoder(config, head_config(config), TreeSettings(budget, width=3), implementation="xla")


def test_stores_are_counted_as_they_are_allocated():
    engine = TinyEngine(random_target(TINY, 0), random_head(TINY, 0), TreeSettings(16), slots=3, capacity=130)
    state, size = engine.runner.state, engine.plan.size
    parts = needs(engine.plan.decoder, size)
    stores, tokens = "stores of 3 x 130 tokens in 9 pages", 3 * 3 * 64  # whole pages
    assert parts[stores] == array_bytes(state)
    row = TINY.layers[0].kv_size * 4
    assert array_bytes((state.stores, state.proposer)) == tokens * row * (TINY.num_layers + 1)
    assert array_bytes(state.stores) == tokens * row * TINY.num_layers
    assert list(parts)[:2] == [stores, "workspace for 3 x 16 nodes"]
    assert_lists([f"  {name} GiB" for name in parts], PARTS)
    # Plain decoding has no head's context.
    plain = needs(decoder_for(TINY, 1), size)
    assert list(plain)[:2] == [stores, "workspace for 3 x 1 nodes"]
    assert parts[stores] - plain[stores] == tokens * row


def test_weights_are_counted_as_they_are_loaded():
    for config, model in ((TINY, random_target(TINY, 0)), (head_config(TINY), random_head(TINY, 0))):
        assert weight_bytes(config, FLOAT32) == array_bytes(model.weights)
        assert weight_bytes(config, jnp.dtype(jnp.bfloat16)) == array_bytes(model.weights) // 2


@pytest.mark.parametrize("parts", [2, 4])
def test_each_device_holds_what_is_counted(parts):
    mesh = mesh_of(1, parts)
    target = load_target(DEMO_TARGET, dtype="float32", mesh=mesh)
    head = load_draft_head(DEMO_DRAFT_HEAD, dtype="float32", target=target)
    for model in (target, head):
        assert set(held_by_each(model.weights)) == {weight_bytes(model.config, FLOAT32, mesh)}
        assert weight_bytes(model.config, FLOAT32, mesh) < weight_bytes(model.config, FLOAT32)
    settings = {"implementation": "xla", "mesh": target.mesh}
    decoder = make_decoder(target.config, head.config, TreeSettings(16), **settings)
    size = EngineSize.of(target.config, 2, 130)
    assert set(held_by_each(empty_state(EnginePlan(decoder, size, FLOAT32)))) == {
        needs(decoder, size)["stores of 2 x 130 tokens in 6 pages"]
    }


def held_by_each(tree):
    held = defaultdict(int)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return list(held.values())


@pytest.mark.wide
@pytest.mark.parametrize("parts", [2, wide(4)])
def test_the_workspace_of_a_device_is_at_least_what_xla_reserves(parts):
    config = dataclasses.replace(TINY, vocab_size=8192)
    mesh = mesh_of(1, parts)
    settings = TreeSettings(64, width=3)
    decoder = make_decoder(config, head_config(config), settings, implementation="xla", mesh=mesh)
    size = EngineSize.of(config, 1, 128)
    target, head = random_target(config, 0), random_head(config, 0)
    weights = DecodeWeights(
        place(target.weights, target.config, mesh), place(head.weights, head.config, mesh)
    )
    state = empty_state(EnginePlan(decoder, size, FLOAT32))
    plan = decoder.program.lower(decoder, weights, state, jnp.int32(1)).compile().memory_analysis()
    estimate = workspace_bytes(EnginePlan(decoder, size, FLOAT32))
    assert plan.temp_size_in_bytes <= estimate <= 3 * plan.temp_size_in_bytes


@pytest.mark.parametrize(
    ("slots", "budget", "capacity", "changes"),
    [
        (1, 64, 128, {"vocab_size": 8192}),  # logits
        (4, 8, 128, {"vocab_size": 8192}),  # noise and draft rows, as many as nodes
        wide(2, 128, 2048, {}),  # scores
        (2, 32, 4096, {"layers": with_windows(TINY, 8, 100).layers}),  # pages and scores of rings
        wide(1, 256, 128, {"layers": with_mlp(TINY, 2048).layers}),  # activations
    ],
)
def test_the_workspace_is_at_least_what_xla_reserves(slots, budget, capacity, changes):
    config = dataclasses.replace(TINY, max_position_embeddings=4096, **changes)
    decoder, size = decoder_for(config, budget), EngineSize.of(config, slots, capacity)
    weights = jax.eval_shape(
        lambda: DecodeWeights(random_target(config, 0).weights, random_head(config, 0).weights)
    )
    state = jax.eval_shape(lambda: empty_state(EnginePlan(decoder, size, FLOAT32)))
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    plan = decoder.program.lower(decoder, weights, state, rounds).compile().memory_analysis()
    estimate = workspace_bytes(EnginePlan(decoder, size, FLOAT32))
    assert plan.temp_size_in_bytes <= estimate <= 3 * plan.temp_size_in_bytes
    # The stores are written in place.
    assert plan.alias_size_in_bytes >= array_bytes((state.stores, state.proposer))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("chunk", "config"),
    [((1, 1024), TINY), ((4, 128), TINY), wide((1, 1024), HYBRID), wide((4, 128), HYBRID)],
    ids=["long", "many", "recurrent, long", "recurrent, many"],
)
def test_the_workspace_of_prompts_is_at_least_what_xla_reserves(chunk, config):
    config = dataclasses.replace(config, max_position_embeddings=2048)
    decoder = decoder_for(config, 16)
    size = EngineSize.of(config, 4, 256, chunks=(chunk,))
    weights = DecodeWeights(*(weights_of(abstract(own)) for own in (config, head_config(config))))
    state = jax.eval_shape(lambda: empty_state(EnginePlan(decoder, size, FLOAT32)))
    shapes = (chunk[:1], jnp.int32), (chunk, jnp.int32), (chunk[:1], jnp.int32), (chunk[:1], bool)
    given = weights, state, *(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    lowered = prefill.lower(decoder.models, *given)
    plan = lowered.compile().memory_analysis()
    estimate = workspace_bytes(EnginePlan(decoder, size, FLOAT32))
    assert plan.temp_size_in_bytes <= estimate <= 4 * plan.temp_size_in_bytes
    assert estimate > workspace_bytes(
        EnginePlan(decoder, dataclasses.replace(size, chunks=((1, 16),)), FLOAT32)
    )


@pytest.mark.wide
def test_what_any_request_may_want_is_counted_from_the_start(device):
    """Its arrays are allocated when a first request wants them, in what was counted."""
    target = random_target(CONFIG, 0, tokenizer=word_tokenizer(64))
    wants = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1, bad_words=["ab", "abc"])
    with LLM(target, max_slots=1) as llm:
        plan = llm.engines.plan
        parts = needs(plan.decoder, plan.size)
        device(sum(parts.values()) - 1)
        with pytest.raises(DeviceMemoryError, match="adjustments of 1 x 64 tokens"):
            llm.generate([[1, 2, 3]], SHORT)
        device(sum(parts.values()))
        llm.generate([[1, 2, 3]], SHORT)
        [engine] = llm.engines.engines()
        assert engine.runner.state.adjust is None
        device(0)
        llm.generate([[1, 2, 3]], wants)
        assert parts["adjustments of 1 x 64 tokens"] == 2 * array_bytes(engine.runner.state.adjust)


@pytest.mark.wide
@pytest.mark.parametrize("wants", [wide((True, False)), wide((False, True)), (True, True)], ids=str)
def test_the_workspace_of_what_requests_want(wants):
    config = dataclasses.replace(TINY, vocab_size=8192)
    decoder, size = decoder_for(config, 64), EngineSize.of(config, 1, 128)
    decoder = dataclasses.replace(decoder, adjusts=wants[0], logprobs=wants[1], max_rounds=8)
    weights = jax.eval_shape(
        lambda: DecodeWeights(random_target(config, 0).weights, random_head(config, 0).weights)
    )
    sizes = {"num_pages": 2, "pages_per_slot": 2, "page_size": PAGE_SIZE, "dtype": FLOAT32}
    state = jax.eval_shape(lambda: decoder.empty_state(1, **sizes))
    rounds = jax.ShapeDtypeStruct((), jnp.int32)
    plan = decoder.program.lower(decoder, weights, state, rounds).compile().memory_analysis()
    parts = extra_bytes(EnginePlan(decoder, size, FLOAT32))
    told = sum(count for name, count in parts.items() if name.startswith("log-probabilities of 1 x"))
    estimate = workspace_bytes(EnginePlan(decoder, size, FLOAT32)) + told
    assert plan.temp_size_in_bytes <= estimate <= 3 * plan.temp_size_in_bytes


def test_an_engine_that_does_not_fit_is_refused(device):
    target, head = random_target(TINY, 0), random_head(TINY, 0)
    decoder, size = decoder_for(TINY, 64), EngineSize.of(TINY, 4, 256)
    enough = total(decoder, size)
    device(enough - 1)

    def make():
        TinyEngine(target, head, TreeSettings(64, width=3), slots=4, capacity=256, implementation="xla")

    with pytest.raises(DeviceMemoryError, match=r"too little memory on .* needed, .* free") as info:
        make()
    assert_lists(str(info.value).splitlines()[1:7], PARTS)
    for free in (enough, None):
        device(free)
        make()


def test_what_the_error_recommends_fits(device):
    decoder, size = decoder_for(TINY, 64), EngineSize.of(TINY, 4, 256)
    device(int(0.6 * total(decoder, size)))
    with pytest.raises(DeviceMemoryError) as info:
        check_engine_memory(EnginePlan(decoder, size, FLOAT32))
    recommended = re.search(r"one of these would fit: budget (\d+), .*max_slots (\d+)$", str(info.value))
    budget, slots = map(int, recommended.groups())
    assert budget < 64
    check_engine_memory(EnginePlan(decoder_for(TINY, budget), size, FLOAT32))
    assert slots < 4
    check_engine_memory(EnginePlan(decoder, EngineSize.of(TINY, slots, 256), FLOAT32))
    # The largest of them: twice as much would not.
    with pytest.raises(DeviceMemoryError):
        check_engine_memory(EnginePlan(decoder, EngineSize.of(TINY, 2 * slots, 256), FLOAT32))

    device(1)
    with pytest.raises(DeviceMemoryError) as info:
        check_engine_memory(EnginePlan(decoder, size, FLOAT32))
    assert "would fit" not in str(info.value)


@pytest.mark.usefixtures("nothing_is_read")
def test_a_parallel_size_that_fits_is_named(device, monkeypatch):
    """The smallest power of two above what there is, of those that divide the model."""
    mesh_of(1, 8)
    target = Source(DEMO_TARGET).target_config
    fits = weight_bytes(target, FLOAT32, mesh_of(1, 4))
    device(fits)
    for mesh in (None, mesh_of(1, 2)):
        with pytest.raises(DeviceMemoryError) as info:
            load_target(DEMO_TARGET, dtype="float32", mesh=mesh)
        assert str(info.value).endswith("\none of these would fit: tensor_parallel_size 4")
        assert ("each of 2 x " in str(info.value)) == (mesh is not None)
    with pytest.raises(AssertionError, match="weights were read"):
        load_target(DEMO_TARGET, dtype="float32", mesh=mesh_of(1, 4))
    device(fits - 1)
    divide = partition.check_partition

    def no_eight(config, mesh):
        if mesh is not None and mesh.size == 8:
            raise ValueError("cannot split")
        divide(config, mesh)

    monkeypatch.setattr(memory, "check_partition", no_eight)
    with pytest.raises(DeviceMemoryError) as info:
        load_target(DEMO_TARGET, dtype="float32")
    assert "would fit" not in str(info.value)
    # An LLM names it beside the other settings, for all that it needs.
    device(int(1.2 * total(make_decoder(target, None, TreeSettings(1)), EngineSize.of(target, 1, None))))
    with pytest.raises(DeviceMemoryError, match=r"would fit: .*tensor_parallel_size [24]$"):
        LLM(DEMO_TARGET, budget=1, dtype="float32")


def test_the_fullest_device_decides(monkeypatch):
    free = {0: 7, 1: 5}
    monkeypatch.setattr(memory, "_free_bytes", lambda device, sharing: free[device.id])
    assert memory.free_bytes(mesh_of(1, 2)) == 5
    assert memory.free_bytes() == 7
    free[1] = 8
    assert memory.free_bytes(mesh_of(1, 2)) == 7


@pytest.mark.usefixtures("nothing_is_read")
def test_weights_that_do_not_fit_are_not_read(device):
    for load, folder in ((load_target, DEMO_TARGET), (load_draft_head, DEMO_DRAFT_HEAD)):
        device(2**20)
        with pytest.raises(DeviceMemoryError, match="weights of the "):
            load(folder)
        device(2**40)
        with pytest.raises(AssertionError, match="weights were read"):
            load(folder)


@pytest.mark.usefixtures("nothing_is_read")
def test_an_llm_counts_all_before_it_reads_anything(device):
    target, head = Source(DEMO_TARGET).target_config, Source(DEMO_DRAFT_HEAD).head_config
    decoder = make_decoder(target, head, TreeSettings(64))
    weights = {"t": weight_bytes(target, FLOAT32), "h": weight_bytes(head, FLOAT32)}
    enough = total(decoder, EngineSize.of(target, 1, None), weights=lambda mesh: weights)
    device(enough - 1)
    with pytest.raises(DeviceMemoryError) as info:
        LLM(budget=64, dtype="float32")
    listed = str(info.value).splitlines()[1:9]
    assert_lists(listed, ("weights of the target", "weights of the draft head", *PARTS))
    assert re.search("would fit: budget 32, capacity 512, dtype bfloat16", str(info.value))
    device(enough)
    with pytest.raises(AssertionError, match="weights were read"):
        LLM(budget=64, dtype="float32")


@pytest.fixture
def llm():
    return LLM(random_target(TINY, 0))


@pytest.mark.parametrize("slots", [1, 2, 8])
def test_an_engine_has_the_slots_that_fit(device, slots):
    target, prompts = random_target(TINY, 0), [[number, 1] for number in range(10)]
    with LLM(target) as llm:
        expected = llm.generate(prompts, SHORT)
        decoder = llm.engines.plan.decoder
        assert llm.engines.engines()[0].plan.size.slots == 8
    device(total(decoder, EngineSize.of(TINY, slots, 256)))
    with LLM(target) as llm:
        assert llm.generate(prompts, SHORT) == expected
        [engine] = llm.engines.engines()
        assert (engine.plan.size.slots, engine.plan.size.num_pages) == (slots, 4 * slots)
        device(0)  # nothing has to be allocated, for any number of prompts
        assert llm.generate(prompts[:1], SHORT) == expected[:1]
        assert llm.generate(prompts, SHORT) == expected
        assert llm.engines.engines() == [engine]
        with pytest.raises(DeviceMemoryError, match="stores of 1 x 256 tokens"):
            generate(llm.target, prompts, SHORT, max_slots=9)


def test_after_an_allocation_that_fails_smaller_ones_work(llm, monkeypatch):
    expected = llm.generate([[1, 1]], SHORT)

    def out_of_memory(plan):
        if plan.size.slots > 8:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return empty_state(plan)

    monkeypatch.setattr(runner, "empty_state", out_of_memory)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        generate(llm.target, [[1, 1]] * 9, SHORT, max_slots=9)
    assert llm.generate([[1, 1]], SHORT) == expected


def test_generate_refuses_before_it_begins(device):
    device(1000)
    with pytest.raises(DeviceMemoryError, match="stores of 1 x 256 tokens"):
        generate(random_target(TINY, 0), [[1, 2]], SHORT)


def test_free_is_the_limit_less_what_is_in_use(monkeypatch):
    class Device:
        device_kind, platform = "some GPU", "gpu"
        stats = None

        def memory_stats(self):
            return self.stats

    device = Device()
    monkeypatch.setattr(memory, "default_device", lambda: device)
    assert memory.free_bytes() is None
    device.stats = {"bytes_in_use": 5}
    assert memory.free_bytes() is None
    device.stats = {"bytes_in_use": 5, "bytes_limit": 12}
    assert memory.free_bytes() == 7
    with pytest.raises(DeviceMemoryError, match="too little memory on some GPU"):
        generate(random_target(TINY, 0), [[1, 2]], SHORT)


def test_on_a_cpu_the_system_says_what_is_free(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "Path", lambda name: tmp_path / name.removeprefix("/"))
    assert memory._available_bytes() is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    3 kB\nCached: 1 kB\n")
    assert memory._available_bytes() == 3 * 1024
    if jax.default_backend() == "cpu":  # whose simulated devices share it
        assert memory.free_bytes(mesh_of(1, 2)) == 3 * 1024 // 2
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  9000 kB\n")
    assert memory._available_bytes() is None
