import asyncio

import openai
import pytest

from jetspec_jax import LLM, AsyncLLM
from tests.serve.servers import Kept, served

TREE = {"budget": 16, "width": 3}


@pytest.fixture(scope="session")
def llm():
    """The demo pair with few slots."""
    made = Kept(max_slots=4, max_waiting=8, **TREE)
    yield made
    asyncio.run(AsyncLLM.close(made))


@pytest.fixture(scope="session")
def alone(llm):
    """What answers are compared with: no tree."""
    return LLM(llm.llm.target, budget=1)


@pytest.fixture(scope="session")
def server(llm):
    with served(llm) as own:
        yield own


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as own:
        yield own


@pytest.fixture(scope="session")
def http(server):
    with server.client() as own:
        yield own
