"""Crowds: requests of all kinds that come, go, share pages and lose them, and what each gets alone."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from jetspec_jax import SamplingParams, StructuredOutputsParams
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.batch import Kind
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.runner import Runner
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.compilations import compilations
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import TinyEngine, check_pool, finish, served

#: How far log-probabilities may differ.
TOLERANCE = 1e-4
# Of the prompts that begin alike: longer than two pages.
BEGINNING = 150
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": "(ab|cd|12){6,20}!"},
    {"grammar": 'start: "ab" item+\nitem: /[0-9]/ | "yes"'},
    {"choice": ["yes", "no", "true"]},
]


@dataclass(frozen=True)
class Asked:
    """One request as a caller makes it.

    Attributes:
        prompt: Token ids.
        params: How it is sampled; ``n`` of them makes so many requests.
        priority: Lower numbers go first.
        most: Tokens after which the caller leaves; None is never.
    """

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    most: int | None = None


def kinds(vocab, *, text, forms):
    """What requests may want, each parameter alone and many together.

    Args:
        vocab: Tokens that there are.
        text: Whether there is a tokenizer.
        forms: Whether it is one that grammars can be made for.
    """
    alone = [
        {},
        {"presence_penalty": 1.2, "frequency_penalty": 0.4},
        {"repetition_penalty": 1.3},
        {"min_tokens": 20, "stop_token_ids": list(range(5, vocab, 3)), "ignore_eos": False},
        {"stop_token_ids": list(range(3, vocab, 40)), "ignore_eos": False},
        {"logit_bias": {token: 2.0 * (-1) ** token for token in range(5, 45)}},
        {"allowed_token_ids": list(range(5, vocab, 2))},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"n": 2},
        {"min_p": 0.05},
        {"top_k": 12, "top_p": 0.9},
        {},
    ]
    if text:
        alone += [{"stop": ["e", "a1", "ab"]}, {"bad_words": ["a", "self", "b"]}]
    everything = {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "logit_bias": {7: -3.0, 11: 2.0},
        "logprobs": 1,
    }
    alone.append({**everything, "allowed_token_ids": list(range(vocab - 7))})
    if forms:
        alone += [{"structured_outputs": StructuredOutputsParams(**form)} for form in FORMS]
        form = StructuredOutputsParams(regex="([a-c]|12)+!")
        bias = {"logit_bias": everything["logit_bias"], "presence_penalty": 0.5, "logprobs": 2}
        alone.append({**bias, "structured_outputs": form})
    return alone


def make_crowd(target, count, rng, *, lengths=(1, 20, 90, 140), without=()):
    """Requests of every kind in turn, greedy and sampled; many prompts begin alike.

    Args:
        target: The target.
        count: How many.
        rng: Chooses prompts, lengths, priorities, and who leaves before the end.
        lengths: Tokens that are asked for.
        without: Names of parameters that nobody has: fewer kinds of rounds are fewer programs.
    """
    vocab, tokenizer = target.config.vocab_size, target.tokenizer
    wanted = kinds(vocab, text=tokenizer is not None, forms=tokenizer is not None and vocab > 200)
    wanted = [own for own in wanted if not own.keys() & set(without)]
    begins = [rng.integers(0, vocab, BEGINNING).tolist() for _ in range(3)]
    crowd = []
    for number in range(count):
        own = wanted[number % len(wanted)]
        shares = rng.random() < 0.6
        begin = (
            begins[int(rng.integers(len(begins)))][: int(rng.choice([64, 70, 128, 150]))] if shares else []
        )
        prompt = (begin if shares else []) + rng.integers(5, vocab, int(rng.integers(1, 40))).tolist()
        most = max(int(rng.choice(lengths)), own.get("min_tokens", 0))
        params = SamplingParams(
            **{
                "temperature": (0.0, 1.0, 0.7)[
                    number // len(wanted) % 3 if number >= len(wanted) else number % 3
                ],
                "seed": number,
                "max_tokens": most,
                "ignore_eos": "structured_outputs" not in own,
                **own,
            }
        )
        leaves = rng.random() < 0.2 and most > 1
        crowd.append(
            Asked(prompt, params, int(rng.integers(-1, 2)), int(rng.integers(0, most)) if leaves else None)
        )
    return crowd


class AtRandom:
    """Chooses buckets and rounds by chance alone, so that a crowd is the same on every machine."""

    def __init__(self, size, buckets, rng, most_rounds):
        self.shapes, self.size, self.rng, self.most_rounds = size.rounds(buckets), size, rng, most_rounds
        self.fixed = None

    def choose(self, live, waiting, forwards, shape_of):
        slots = self.size.live_for(len(live))
        if self.fixed is not None:
            return shape_of(slots, self.fixed), 1
        buckets = [bucket for own, bucket in self.shapes if own == slots]
        most = 1 if any(slot.fresh for slot in live) else self.most_rounds
        return shape_of(slots, int(self.rng.choice(buckets))), int(self.rng.integers(1, most + 1))

    def observe(self, record):
        pass


class Alone:
    """Plain decoding of one request at a time, of which nothing is in the stores before."""

    def __init__(self, target, capacity):
        self.engine = TinyEngine(target, slots=1, capacity=capacity)
        self.engine.scheduler.pool.shares = False

    def __call__(self, asked):
        """The completions of a prompt."""
        requests = requests_of(self.engine, asked)
        completions = served(self.engine, requests)
        assert all(request.prefix_tokens == 0 for request in requests)
        return completions


def requests_of(engine, asked):
    """Requests for all completions of a prompt."""
    read = check_request(engine.target, asked.prompt, asked.params, capacity=engine.plan.size.capacity)
    made = read.requests(engine.settings, engine.plan.decoder)
    for request in made:
        request.priority = asked.priority
    return made


def engine_for_many(
    monkeypatch, target, head, crowd, rng, *, most_rounds=6, live=(2,), truth=None, overlapped=None, **size
):
    """An engine that has all programs that a crowd needs.

    Args:
        monkeypatch: Pytest's.
        target: The target.
        head: The draft head; None takes an oracle that knows ``truth``.
        crowd: The requests.
        rng: Chooses buckets and rounds.
        most_rounds: Of a dispatch.
        live: Numbers of live slots that have programs, beside all.
        truth: By seed, the whole sequence of each request.
        overlapped: Whether rounds overlap; None chooses for the device.
        **size: As of `plan_engine`.
    """
    own = {}
    if head is None:
        oracle, slots = OracleProposer(target.config.vocab_size), size["slots"]
        own = {"proposer": oracle, "proposer_weights": plant([[]] * slots, size["capacity"] + 16)}
        _plant_at_launch(monkeypatch, truth, slots, size["capacity"] + 16)
    engine = TinyEngine(
        target,
        head,
        TreeSettings(16, 3, algorithm="auto"),
        live=live,
        prefill_tokens=128,
        least_nodes=16,
        overlapped=overlapped,
        **own,
        **size,
    )
    policy = AtRandom(engine.plan.size, tuple(engine.runner.decoders), rng, most_rounds)
    engine.scheduler.policy = policy
    _compile_all(engine, policy, crowd)
    return engine


def _plant_at_launch(monkeypatch, truth, slots, length):
    """An oracle that knows what each request says, whichever slot it has."""
    launch, held = Runner.launch, [[] for _ in range(slots)]

    def launched(runner, batch, *arguments, **settings):
        if runner.decoder.proposer is not None:
            for own in batch.admissions:
                held[own.slot] = truth.get(own.params.seed, [])
            runner.weights = runner.weights._replace(proposer=plant(held, length))
        return launch(runner, batch, *arguments, **settings)

    monkeypatch.setattr(Runner, "launch", launched)


def _compile_all(engine, policy, crowd):
    """Runs every program that a crowd can need."""
    engine.runner.compiler.compile(engine.runner.programs([Kind()]))
    adjusts = {"presence_penalty": 0.1} if any(own.params.adjusts for own in crowd) else {}
    tells = {"logprobs": 1} if any(own.params.logprobs is not None for own in crowd) else {}
    form = {"structured_outputs": StructuredOutputsParams(choice=["ab"]), "ignore_eos": False}
    wanted = [{}, adjusts, tells, {**adjusts, **tells}]
    if any(own.params.structured_outputs for own in crowd):
        wanted += [{**own, **form} for own in wanted]
    for live, bucket in policy.shapes:
        policy.fixed = bucket
        for own in wanted:
            params = SamplingParams(**{"max_tokens": 2, "ignore_eos": True, "seed": 2**63, **own})
            for _ in range(live):
                engine.submit([1, 2], params)
            finish(engine)
    scored = [own for own in crowd if own.params.prompt_logprobs is not None]
    for asked in scored[:1]:
        engine.submit([1, 2], dataclasses.replace(asked.params, max_tokens=1, min_tokens=0, n=1))
        finish(engine)
    policy.fixed = None


@dataclass
class Told:
    """What came of a crowd.

    Attributes:
        outputs: Of each request that was asked for, its completions so far.
        compiled: Programs that were compiled meanwhile.
        batches: What the engine launched.
    """

    outputs: list[list[Output]]
    compiled: int
    batches: list

    @property
    def requests(self):
        return [output.request for outputs in self.outputs for output in outputs]

    @property
    def preemptions(self):
        return sum(request.preemptions for request in self.requests)

    @property
    def prefix_hits(self):
        return sum(request.prefix_tokens > 0 for request in self.requests)


def serve_crowd(engine, crowd, rng, *, arrivals=2.0, check_every=7):
    """Serves a crowd to its end; requests come at random steps, and callers leave as they said."""
    line, outputs, batches, steps = list(crowd), [], [], 0
    next_batch, pool = engine.scheduler.next_batch, engine.scheduler.pool

    def noted(*arguments):
        batch = next_batch(*arguments)
        batches.extend([] if batch is None else [batch])
        return batch

    with compilations() as seen:
        engine.scheduler.next_batch = noted
        while line or engine.busy:
            steps += 1
            assert steps < 100 * len(crowd), "the engine makes no progress"
            for _ in range(min(int(rng.poisson(arrivals)), len(line))):
                own = [engine.admit(request) for request in requests_of(engine, line.pop(0))]
                outputs.append([Output(request, engine.target.tokenizer) for request in own])
            if engine.launch():
                _read(outputs, crowd)
            # With room for another batch, chance decides whether it is launched before this one is fetched.
            full = not engine.scheduler.has_room
            if engine.runner.in_flight and (full or rng.random() < 0.5):
                engine.collect()
                _read(outputs, crowd)
            if steps % check_every == 0:
                check_pool(pool, [own.request.pages for each in outputs for own in each if own.request.pages])
        while engine.runner.in_flight:
            engine.collect()
        engine.scheduler.drop_closed()
        del engine.scheduler.next_batch
    check_pool(pool, [])
    assert pool.num_free == engine.plan.size.num_pages
    return Told(outputs, len(seen), batches)


def _read(outputs, crowd):
    """Takes in what has come; callers that have seen enough leave."""
    for own, asked in zip(outputs, crowd, strict=False):
        for output in own:
            request = output.request
            if request.cancelled or output.finish_reason is not None:
                continue
            output.update()
            if output.finish_reason is not None:
                request.cancel()
            elif asked.most is not None and len(output.token_ids) >= asked.most:
                request.cancel()  # as one whose stream is closed


def assert_as_alone(target, crowd, told, alone):
    """Everybody got what they get alone, or a beginning of it if they left.

    Returns:
        How many completions have been finished, and those that differ by a listed tie.
    """
    finished, ties = 0, []
    for asked, outputs, expected in zip(crowd, told.outputs, alone, strict=True):
        for child, output, whole in zip(asked.params.each(), outputs, expected, strict=True):
            known = output.token_ids
            done = output.finish_reason is not None
            finished += done
            wanted = whole.token_ids if done else whole.token_ids[: len(known)]
            if known != wanted:
                difference = first_divergence(target, asked.prompt, child, known, wanted)
                assert difference.is_tie, (asked, difference)
                ties.append(difference)
            elif done:
                own = output.completion()
                assert (own.text, own.finish_reason) == (whole.text, whole.finish_reason), asked
                assert_logprobs(own.logprobs, whole.logprobs)
                assert_logprobs(own.prompt_logprobs, whole.prompt_logprobs)
    return finished, ties


def assert_logprobs(got, expected):
    """The same values; at the edge of those that are told, tokens of one value may trade places."""
    assert (got is None) == (expected is None)
    for mine, other in zip(got or (), expected or (), strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            values = [sorted(one.logprob for one in own.values()) for own in (mine, other)]
            np.testing.assert_allclose(*values, rtol=0, atol=TOLERANCE)
            for token in mine.keys() & other.keys():
                np.testing.assert_allclose(mine[token].logprob, other[token].logprob, rtol=0, atol=TOLERANCE)
