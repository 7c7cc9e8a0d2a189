"""The server on Ray Serve: replicas, each with models and an engine of its own, as many as the load needs.

From a checkout, with the extra ``ray``::

    serve run deploy.ray_serve:app target=PATH draft_head=PATH gpus=1 max_replicas=4
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve


class Replicas(BaseModel):
    """What is served, and by how many replicas."""

    model_config = ConfigDict(extra="forbid")

    target: str = "demo"
    draft_head: str | None = None
    budget: int | None = None
    max_slots: int = 8
    tensor_parallel_size: int = 1
    gpus: int = 0  # of each replica
    min_replicas: int = 1
    max_replicas: int = 2
    max_queued_requests: int = 256  # at each proxy, beyond which it answers 503
    settings: dict[str, Any] = {}  # of `jetspec_jax.serve.settings.ServeSettings`


def app(replicas: Replicas) -> serve.Application:
    """The application that ``serve run`` starts."""

    def build() -> Any:
        """In each replica: loads the models, compiles, and makes the app; no request comes before."""
        from jetspec_jax import AsyncLLM
        from jetspec_jax.serve.app import make_app, warm_up
        from jetspec_jax.serve.settings import ServeSettings

        settings = ServeSettings(**replicas.settings)
        own = {"target", "draft_head", "budget", "max_slots", "tensor_parallel_size"}
        llm = AsyncLLM(**replicas.model_dump(include=own))
        with ThreadPoolExecutor(1) as elsewhere:  # a loop runs here already
            elsewhere.submit(asyncio.run, warm_up(llm, settings)).result()
        return make_app(llm, settings, name=replicas.target)

    # A replica takes what its slots can; the rest waits at the proxies, for whichever has room first.
    return serve.deployment(
        name="jetspec",
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.max_slots,
        },
        max_ongoing_requests=replicas.max_slots,
        max_queued_requests=replicas.max_queued_requests,
        ray_actor_options={"num_gpus": replicas.gpus},
    )(serve.ingress(build)()).bind()
