"""The tree's tokens are plain decoding's, token for token, whatever is drawn.

65 draws (20 in `make test`) of weights and prompts over four shapes of batches, with a model that mixes
sliding and full layers and sequences that grow past the window. Each member of a batch is first decoded
plainly, alone and without any stop condition; a few lines of Python cut that text where its stop conditions
end it. The batch then runs plainly, with a random draft head and with the oracle proposer, and must give the
same.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, Target, generate, generate_tree, logits
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.sampling.choice import gumbel_noise
from jetspec_jax.sampling.drafting import DraftScoring
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import accept, build_tree
from tests.decode.oracle import OracleProposer, plant
from tests.decode.ties import TIE, choice_rows, first_difference, gap_of_difference, gaps
from tests.decode.tiny import (
    SLIDING,
    TinyEngine,
    random_head,
    random_target,
    serve,
    with_windows,
    word_tokenizer,
)
from tests.marks import wide

# No sequence is longer, and what attention sees of a slot is what takes the time.
LONGEST = 128
CONFIG = dataclasses.replace(SLIDING, max_position_embeddings=LONGEST)
ORACLE = OracleProposer(CONFIG.vocab_size)
MOST_TOKENS = 32
# What the oracle is asked beyond a request's end: a round may overshoot it by a whole tree.
FREE_TOKENS = MOST_TOKENS + ORACLE.depth + 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static, so what compiles: the bucket of the budgets, the slots, the width, the head's mask."""

    members: tuple[int, int]
    slots: int
    budgets: tuple[int, int]
    width: int
    causal: bool
    draws: int


SHAPES = (
    Shape(members=(1, 1), slots=1, budgets=(9, 16), width=2, causal=True, draws=60),
    Shape(members=(2, 4), slots=4, budgets=(2, 8), width=2, causal=True, draws=20),
    Shape(members=(2, 4), slots=2, budgets=(33, 64), width=3, causal=False, draws=70),  # some wait for a slot
    Shape(members=(5, 8), slots=8, budgets=(17, 32), width=2, causal=True, draws=50),
)
MOST_SLOTS = max(shape.slots for shape in SHAPES)


@dataclasses.dataclass
class Draw:
    """One draw, and all that ran on it."""

    seed: int
    shape: Shape
    target: Target
    prompts: list[list[int]]
    params: list[SamplingParams]
    settings: TreeSettings
    free: list[list[int]]
    outputs: dict[str, list]


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer(CONFIG.vocab_size)


@pytest.fixture(scope="module", params=[wide(3), 10], ids=["one draw of three", "one draw of ten"])
def draws(request, tokenizer):
    if request.param == 3:
        request.getfixturevalue("optimised")
    seeds = iter(range(1000))
    counts = [shape.draws // request.param for shape in SHAPES]
    return [
        run_draw(next(seeds), shape, tokenizer)
        for shape, count in zip(SHAPES, counts, strict=True)
        for _ in range(count)
    ]


def run_draw(seed, shape, tokenizer):
    rng = np.random.default_rng(seed)
    target = random_target(CONFIG, seed, tokenizer=tokenizer)
    members = int(rng.integers(*shape.members, endpoint=True))
    prompts = [rng.integers(0, 64, rng.integers(1, 60)).tolist() for _ in range(members)]
    sampling = [draw_sampling(rng) for _ in range(members)]

    free = [
        generate(target, [prompt], SamplingParams(**own, max_tokens=FREE_TOKENS))[0].token_ids
        for prompt, own in zip(prompts, sampling, strict=True)
    ]
    eos = (int(rng.choice(free[0])),) if rng.random() < 0.5 else ()
    target = dataclasses.replace(target, eos_token_ids=eos)
    params = [
        SamplingParams(**own, **draw_ending(rng, tokens, tokenizer))
        for own, tokens in zip(sampling, free, strict=True)
    ]
    settings = TreeSettings(
        budget=int(rng.integers(*shape.budgets, endpoint=True)),
        width=shape.width,
        depth=None if rng.random() < 0.8 else int(rng.integers(1, 8)),
    )
    head = random_head(CONFIG, seed, causal=shape.causal)
    outputs = {
        "plain": generate(target, prompts, params, max_slots=shape.slots),
        "tree": generate_tree(
            target, head, prompts, params, max_slots=shape.slots, **dataclasses.asdict(settings)
        ),
        "oracle": run_oracle(target, prompts, params, free, scattering(settings), shape.slots, seed),
    }
    return Draw(seed, shape, target, prompts, params, settings, free, outputs)


def scattering(settings):
    """The same, but with all children of a node side by side, so that few paths are the first nodes."""
    return dataclasses.replace(settings, algorithm="accum_logp")


def run_oracle(target, prompts, params, free, settings, slots, seed):
    engine = TinyEngine(
        target,
        None,
        settings,
        slots=slots,
        capacity=LONGEST,
        proposer=ORACLE,
        proposer_weights=planted(prompts, free, slots, seed),
    )
    # No more than there are slots: the oracle knows its requests by their slots.
    return serve(engine, prompts[:slots], params[:slots])


def planted(prompts, free, slots, seed):
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(prompts, free, strict=True)]
    return plant((sequences + [[]] * slots)[:slots], LONGEST, seed)


def draw_sampling(rng):
    own = {"temperature": float(rng.choice([0.0, 1.0, 1.0, 0.7])), "seed": int(rng.integers(0, 2**40))}
    if rng.random() < 0.3:
        own |= {"top_k": int(rng.integers(1, 30))}
    if rng.random() < 0.3:
        own |= {"top_p": float(rng.uniform(0.3, 1))}
    if rng.random() < 0.3:
        own |= {"min_p": float(rng.uniform(0, 0.5))}
    return own


def draw_ending(rng, tokens, tokenizer):
    ending = {"max_tokens": int(rng.integers(1, MOST_TOKENS + 1)), "ignore_eos": bool(rng.random() < 0.3)}
    kind = rng.choice(["length", "length", "stop token", "stop string"])
    if kind == "stop token":
        ending |= {"stop_token_ids": (int(rng.choice(tokens)), int(rng.integers(64)))}
    if kind == "stop string":
        # May begin and end inside a token, and span several.
        text = tokenizer.decode(tokens)
        start = int(rng.integers(len(text) - 5))
        ending |= {"stop": ("never there", text[start : start + int(rng.integers(1, 5))])}
    return ending


def expected_end(tokens, params, eos, tokenizer):
    """Token ids, finish reason and text of an output whose tokens would go on as given."""
    words = tokenizer.convert_ids_to_tokens(tokens)
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    text = ""
    for n in range(params.max_tokens):
        if tokens[n] in stop_ids:
            return tokens[: n + 1], "stop", text
        text += words[n]
        found = [text.index(stop) for stop in params.stop if stop in text]
        if found:
            return tokens[: n + 1], "stop", text[: min(found)]
    return tokens[: params.max_tokens], "length", text


@pytest.fixture(scope="module")
def ties(draws, tokenizer):
    """Compares every output with what it must be: the listed ties, or an error naming what differs."""
    listed = []
    for draw in draws:
        for name, completions in draw.outputs.items():
            for b, got in enumerate(completions):
                prompt, params = draw.prompts[b], draw.params[b]
                end = expected_end(draw.free[b], params, draw.target.eos_token_ids, tokenizer)
                if (got.token_ids, got.finish_reason, got.text) == end:
                    continue
                where = f"draw {draw.seed}, member {b}, {name}: {params}"
                assert first_difference(end[0], got.token_ids) is not None, f"{where}\n{got}\n{end}"
                gap = gap_of_difference(draw.target, prompt, end[0], got.token_ids, params)
                assert gap < TIE, f"{where}: differs at a gap of {gap}\n{got}\n{end}"
                listed.append((draw.seed, b, name, gap))
    return listed


def test_everything_equals_plain_decoding_alone(draws, ties):
    assert len(draws) in (20, 65)
    assert len(ties) <= 2, ties


def test_the_draws_are_what_they_claim(draws):
    # Otherwise equality would say little: outputs must vary, end in every way, and mid-path too.
    outputs = [output for draw in draws for output in draw.outputs["oracle"]]
    members = {len(draw.prompts) for draw in draws}
    assert members == set(range(1, 9)) if len(draws) > 20 else len(members) >= 5
    assert np.mean([len(set(tokens)) for draw in draws for tokens in draw.free]) > 8
    assert 0.3 < np.mean([output.finish_reason == "stop" for output in outputs]) < 0.7
    cut_mid_path = [sum(output.accept_lengths) > len(output.token_ids) for output in outputs]
    assert np.mean(cut_mid_path) > 0.5


def test_accept_lengths_account_for_every_token(draws):
    for draw in draws:
        for completions in draw.outputs.values():
            for output in completions:
                # Only the last round may overshoot.
                assert sum(output.accept_lengths) >= len(output.token_ids)
                assert sum(output.accept_lengths[:-1]) < len(output.token_ids)
                assert output.rounds == len(output.tree_sizes)


def test_every_token_is_the_choice_after_its_own_prefix(draws):
    # Plain decoding itself, held against one forward over the whole sequence: no stores, no rounds.
    for draw in draws[::4]:
        prompt, params, tokens = draw.prompts[0], draw.params[0], draw.free[0]
        rows = choice_rows(draw.target, prompt, tokens, params, length=LONGEST)
        wrong = (rows.argmax(-1) != tokens) & (gaps(rows) >= TIE)
        assert not wrong.any(), f"draw {draw.seed}, tokens {np.flatnonzero(wrong)}"


def test_oracle_paths_are_deep_and_scattered(draws, ties):
    """Every round's tree is built again, from the oracle's rows and outside of the decoder.

    The path that the planted truth takes through it must be what the decoder accepted.
    """
    tied = {(seed, b) for seed, b, name, _ in ties if name == "oracle"}
    accepted, scattered = [], []
    for draw in draws:
        slot, position, lengths = [], [], []
        for b, output in enumerate(draw.outputs["oracle"]):
            if (draw.seed, b) in tied:
                continue
            ends = np.cumsum([len(draw.prompts[b]) - 1, *output.accept_lengths])
            slot += [b] * output.rounds
            position += ends[:-1].tolist()
            lengths += output.accept_lengths
        # Of as many slots for every shape, so that one program makes the rows of all.
        weights = planted(draw.prompts, draw.free, MOST_SLOTS, draw.seed)
        of_members = [Sampling.of(own) for own in (*draw.params, *[SamplingParams(seed=0)] * MOST_SLOTS)]
        sampling = jax.tree.map(lambda *own: np.stack(own), *of_members[:MOST_SLOTS])
        path = accepted_paths(
            weights, np.array(slot), np.array(position), scattering(draw.settings), sampling
        )
        assert ((path >= 0).sum(1) == lengths).all(), f"draw {draw.seed}"
        accepted += lengths
        scattered += ((path != np.arange(path.shape[1])) & (path >= 0)).any(1).tolist()
    # Drafted tokens alone, without the bonus token.
    assert np.mean(accepted) - 1 >= 4
    assert np.mean(scattered) >= 0.5


def accepted_paths(weights, slot, position, settings, sampling, chunk=64):
    """Paths ``[R, D + 1]`` of R rounds, in chunks of one size; each slot has its request's settings."""
    paths = [np.zeros((0, ORACLE.depth + 1), int)]
    for start in range(0, len(slot), chunk):
        part = slice(start, start + chunk)
        pad = (0, chunk - len(slot[part]))
        slots = np.pad(slot[part], pad)
        of_rounds = jax.tree.map(lambda of_slots, slots=slots: jnp.asarray(of_slots[slots]), sampling)
        rows, choices_at = _rows(weights, slots, np.pad(position[part], pad), of_rounds)
        tree = build_tree(
            rows,
            jnp.zeros(chunk, jnp.int32),
            width=settings.width,
            budget=settings.budget,
            depth=settings.depth,
            algorithm=settings.algorithm,
        )
        choices = jnp.take_along_axis(choices_at, tree.depths, axis=1)
        paths.append(np.asarray(_accept(tree, choices).path)[: chunk - pad[1]])
    return np.concatenate(paths)


@jax.jit
def _rows(weights, slot, position, sampling):
    depths = jnp.arange(ORACLE.depth + 1)[None, :]
    noise = gumbel_noise(sampling.key, position + 1, ORACLE.depth, local=ORACLE.vocab_size)
    rows = DraftScoring(sampling.temperature, noise).perturbed(ORACLE.rows(weights, slot, position))
    # A node at depth d emits the token d + 1 behind the anchor.
    return rows, weights.truth[slot[:, None], position[:, None] + 1 + depths]


@jax.jit
def _accept(tree, choices):
    return accept(tree, choices, max_depth=ORACLE.depth)


def test_the_windows_matter():
    # The sliding draws above say something only if a window hides what lies before it.
    target = random_target(SLIDING, 0)
    full = dataclasses.replace(target, config=with_windows(SLIDING, None, None))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 24))
    difference = np.abs(np.asarray(logits(target, tokens) - logits(full, tokens))).max(-1)[0]
    assert difference[:8].max() < 1e-5 < 1e-2 < difference[8:].min()
