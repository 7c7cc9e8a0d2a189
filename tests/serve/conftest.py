import asyncio
import logging

import openai
import pytest

from jetspec_jax import LLM, AsyncLLM
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.config import ModelConfig, Rope
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.serve.logs import LOG
from tests.decode.tiny import random_head, random_target
from tests.events import PATIENCE
from tests.serve.servers import Kept, served

TREE = {"budget": 8, "width": 2, "algorithm": "top_nodes"}
#: Few and small layers with the demo's vocabulary, so that programs are compiled fast.
SMALL = ModelConfig.uniform(
    "qwen3",
    1,
    vocab_size=4096,
    hidden_size=32,
    rms_norm_eps=1e-6,
    max_position_embeddings=1024,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    mlp_size=32,
    rope=Rope(1e4, 16),
)


def small_target(template=None):
    """A target with the demo's tokenizer, and maybe another chat template; each call makes an equal one."""
    tokenizer = load_tokenizer(DEMO_TARGET)
    if template is not None:
        tokenizer.chat_template = template
    return random_target(SMALL, 0, tokenizer=tokenizer, eos=(0,))


@pytest.fixture(autouse=True)
def logs_as_before():
    """A command that runs in this process writes its log where the test has it captured, and no longer."""
    loggers = LOG, logging.getLogger("uvicorn")
    before = [(own, own.handlers, own.level, own.propagate) for own in loggers]
    yield
    for own, handlers, level, propagate in before:
        own.handlers, own.propagate = handlers, propagate
        own.setLevel(level)


@pytest.fixture(scope="session")
def llm():
    made = Kept(small_target(), random_head(SMALL, 0), max_slots=4, max_waiting=8, **TREE)
    yield made
    asyncio.run(AsyncLLM.close(made))


@pytest.fixture(scope="session")
def alone():
    """What answers are compared with: an engine of its own, without trees, for one request at a time."""
    return LLM(small_target(), max_slots=1)


@pytest.fixture(scope="session")
def server(llm):
    with served(llm) as own:
        yield own


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as own:
        yield own


@pytest.fixture(scope="session")
def http(server):
    with server.client() as own:
        yield own
