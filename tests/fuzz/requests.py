"""Requests and settings of every kind: what is served is right, what is not is refused before any work."""

import dataclasses
import math

import numpy as np

from jetspec_jax import LLM, DeviceMemoryError, SamplingParams, draft_logits, generate, generate_tree, logits
from jetspec_jax.engine.output import Completion
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.tiny import TINY, flat, free_pages, random_head, random_target, with_windows, word_tokenizer
from tests.fuzz.mutators import pick
from tests.fuzz.outcomes import Finding, ending

# A model that is a text is looked for as a folder.
ALLOWED = (ValueError, TypeError, FileNotFoundError, DeviceMemoryError)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CONFIG = with_windows(TINY, None)

#: What no setting takes, or only some.
ANYTHING = (
    *(None, True, False, 0, 1, 2, -1, 3, 7, 256, 257, 2**31, 2**63, 2**64 - 1, 2**64, 10**400, -(10**400)),
    *(0.0, 0.5, 1.0, 1.5, -0.5, 1e-320, 1e-30, 1e30, 1e308, math.inf, -math.inf, math.nan, 1j),
    *("", "a", "ab", "\ud800", "\0", "a" * 3000, b"a", [], [0], ["a"], [""], [None], [[1]], {}, {"a": 1}, ()),
    *(np.int64(3), np.float32(0.5), np.array([1, 2]), np.array(2.0), object(), int, SamplingParams()),
)
#: What each takes, so that many requests are served.
GOOD = {
    "temperature": (0, 0.0, 0.7, 1, 1e-30, 1e30, 1e308, np.float32(0.5)),
    "top_k": (None, 1, 2, 40, 10**6, np.int64(3)),
    "top_p": (None, 1e-30, 0.5, 1, 1.0),
    "min_p": (None, 0, 0.1, 1.0),
    "seed": (0, 7, -1, -(2**63), 2**64 - 1),
    "max_tokens": (1, 2, 7, 20, np.int64(4)),
    "stop": (None, (), "a", ["b", "cd"], "zz"),
    "stop_token_ids": (None, (), [3], (0, 63), np.array([5]).tolist()),
    "ignore_eos": (True, False),
    "n": (1, 1, 2, 3),
    "include_stop_str_in_output": (True, False),
    "skip_special_tokens": (True, False),
}
PROMPTS = (
    *("abc", "hello", "a", "", "é", "\ud800", "a" * 300, "a" * 10**5, None, 5, 3.5, b"abc", True),
    *(
        [1, 2, 3],
        [0],
        [],
        [63] * 40,
        [64],
        [-1],
        [2**70],
        [1] * 256,
        [True],
        [1.0],
        ["a"],
        [None],
        [[1], [2]],
    ),
    *([[1, 2], [3]], (1, 2), range(3), np.array([1, 2]), np.array([[1]]), np.array([1.5]), np.array([], int)),
    *({"prompt": "abc"}, {"prompt_token_ids": [1]}, {"text": "abc"}, {1: 2}, {1, 2}, object()),
)
SETTINGS = {
    "budget": (1, 16),
    "width": (3,),
    "depth": (None, 3, 7),
    "candidates": (None, 3),
    "algorithm": ("accum_logp",),
    "max_slots": (1, 2),
    "implementation": (None, "xla"),
    "routing": (None, {}, {"task": "math"}, {"text": "abc"}),
    "capacity": (None, 256),
    "dtype": ("auto", "float32"),
    "compilation_cache": ("off",),
    "ignore_config_keys": ((), []),
    "allow_nonfinite": (False, True),
}
OF_A_TREE = ("budget", "width", "depth", "candidates", "algorithm", "max_slots", "implementation", "routing")
OF_AN_LLM = (
    *("budget", "width", "depth", "candidates", "algorithm", "max_slots", "implementation"),
    *("capacity", "dtype", "compilation_cache", "ignore_config_keys", "allow_nonfinite"),
)
#: Completions of one prompt that are compared.
MOST = 4
ROLES = ("user", "assistant", "system", "", None, 5)


class Requests:
    """Cases for one target, its head, and an LLM over both."""

    def __init__(self, place, seed):
        """Compiles what most requests are served with."""
        del place
        self.seed = seed
        tokenizer = word_tokenizer(CONFIG.vocab_size)
        tokenizer.chat_template = TEMPLATE
        self.target = random_target(CONFIG, 0, eos=(5,), tokenizer=tokenizer)
        self.head = random_head(CONFIG, 1)
        self.llm = LLM(self.target, self.head, budget=16, width=3, max_slots=2)
        self.plain = dataclasses.replace(self.target)  # with an engine of its own
        prompts, params = [[1, 2]] * 2, SamplingParams(max_tokens=2, seed=0)
        self._check(params, flat(self.llm.generate(prompts, params)))

    def __call__(self, index):
        """Runs one case: what was asked for, and how it ended."""
        rng = np.random.default_rng([self.seed, 2, index])
        ask = pick(
            rng, (*[self._generate] * 5, self._stream, self._stream, self._chat, self._settings, self._ids)
        )
        what = []
        try:
            ended = ask(rng, what)
        except Finding as finding:
            raise Finding(f"{ask.__name__} {what}: {finding}") from finding
        except BaseException as error:
            try:
                ended = ending(error, ALLOWED)
            except Finding as finding:
                raise Finding(f"{ask.__name__} {what}: {finding}") from error
        self._check_whole(what)
        return f"{ask.__name__} {what}", ended

    def _params(self, rng, what):
        """Sampling parameters with a few settings, some of which may be anything."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        settings = {"seed": 3, "max_tokens": 5}
        for name in {pick(rng, names) for _ in range(int(rng.integers(5)))}:
            settings[name] = pick(rng, GOOD[name] if name in GOOD and rng.random() < 0.8 else ANYTHING)
        what.append(_cut(settings))
        if rng.random() < 0.03:
            return pick(rng, ANYTHING)
        return SamplingParams(**settings)

    def _prompts(self, rng, what):
        prompts = [_prompt(rng) for _ in range(int(rng.integers(1, 4)))]
        if rng.random() < 0.15:
            prompts = pick(rng, PROMPTS)
        what.append(_cut(prompts))
        return prompts

    def _generate(self, rng, what):
        prompts, params = self._prompts(rng, what), self._params(rng, what)
        if isinstance(prompts, list) and rng.random() < 0.2:
            params = [params] * int(rng.integers(4))
        return self._check(params, flat(self.llm.generate(prompts, params)))

    def _stream(self, rng, what):
        prompt = _prompt(rng)
        what.append(_cut(prompt))
        params = self._params(rng, what)
        stream = self.llm.stream(prompt, params)
        left = int(rng.integers(1, 30))
        what.append(left)
        with stream:
            pieces = [piece for piece, _ in zip(stream, range(left), strict=False)]
        if stream.completion is None:
            return "left a stream"
        if "".join(pieces) != stream.completion.text and len(pieces) < left:
            raise Finding(f"pieces {pieces} of {stream.completion.text!r}")
        return self._check(params, [stream.completion])

    def _chat(self, rng, what):
        messages = [
            {"role": pick(rng, ROLES), "content": pick(rng, (*("ab", "c", "xyz") * 3, *ANYTHING))}
            for _ in range(int(rng.integers(1, 3)))
        ]
        if rng.random() < 0.3:
            messages = pick(
                rng, (*ANYTHING, [messages], [messages, messages], [{}], [{"role": "user"}], "abc")
            )
        what.append(_cut(messages))
        found = flat(self.llm.chat(messages, self._params(rng, what)))
        return _completions(found)

    def _settings(self, rng, what):
        """Trees and an LLM with settings of any kind, of which nearly all are refused."""
        names = pick(rng, (OF_A_TREE, OF_AN_LLM))
        settings = {"budget": 16, "width": 3, **({} if names is OF_A_TREE else {"compilation_cache": "off"})}
        for name in {pick(rng, names) for _ in range(int(rng.integers(1, 4)))}:
            settings[name] = pick(rng, SETTINGS[name] if rng.random() < 0.3 else ANYTHING)
        what.append(_cut(settings))
        params = SamplingParams(max_tokens=1)
        if names is OF_A_TREE:
            return _completions(flat(generate_tree(self.target, self.head, [[1, 2]], params, **settings)))
        models = pick(rng, ((self.target, self.head), *((value, None) for value in ANYTHING)))
        what.append(_cut(models[0]))
        llm = LLM(*models, **settings)
        return f"an LLM of {llm.settings.budget} nodes"

    def _ids(self, rng, what):
        """Token ids of any kind for the functions that look inside."""
        ids = pick(rng, (IDS, IDS.tolist(), *PROMPTS, *ANYTHING))
        what.append(_cut(ids))
        call = pick(rng, (logits, draft_logits))
        if call is logits:
            rows = np.asarray(logits(self.target, ids))
        else:
            rows = np.asarray(draft_logits(self.target, self.head, ids))
        if rows.shape[-1] != CONFIG.vocab_size or not np.isfinite(rows).all():
            raise Finding(f"logits of shape {rows.shape}")
        return "logits"

    def _check(self, params, completions):
        """What trees gave is what plain decoding gives; a list of settings is compared prompt by prompt."""
        _completions(completions)
        number = -1
        for found in completions:
            number += found.index == 0
            own = params[number] if isinstance(params, list) else params
            if own is None or own.seed is None or found.index >= MOST:
                continue  # without a seed each run draws one of its own
            one, ids = own.each()[found.index], found.prompt_token_ids
            [plain] = generate(self.plain, [ids], one)
            difference = first_divergence(self.plain, ids, one, found.token_ids, plain.token_ids)
            # At a filter's edge rounding may let a token in or keep it out.
            if difference is not None and not difference.is_tie:
                raise Finding(f"{difference} for {ids} and {one}")
        return "correct"

    def _check_whole(self, what):
        """Whatever has happened, all pages are free."""
        [engine] = self.llm.engines.engines()
        engine.run(lambda: None)
        if not engine.open_requests:
            free, pages = free_pages(engine.scheduler), engine.plan.size.num_pages
            if free != pages:
                raise Finding(f"{what}: {free} of {pages} pages are free")


IDS = np.arange(8)[None]


def _completions(found):
    if not isinstance(found, list) or not all(isinstance(one, Completion) for one in found):
        raise Finding(f"not completions: {found!r}")
    return f"{len(found)} completions"


def _prompt(rng):
    return pick(rng, (*("abc", [1, 2, 3], "xyz", [7]) * 12, *PROMPTS))


def _cut(value):
    return repr(value)[:150]
