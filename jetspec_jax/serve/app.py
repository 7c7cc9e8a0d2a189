"""The ASGI app with all routes for one `AsyncLLM`."""

import asyncio
import platform
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.routing import Route

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.progress import LINE_SECONDS
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.chat import chat_routes
from jetspec_jax.serve.completions import completion_routes
from jetspec_jax.serve.errors import ApiError, add_handlers
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.middleware import Gate, Tracking
from jetspec_jax.serve.playground.routes import playground_routes
from jetspec_jax.serve.service import Service
from jetspec_jax.serve.settings import ServeSettings
from jetspec_jax.serve.tokens import token_routes
from jetspec_jax.version import __version__

#: Parameters that need all programs that "usual" warm-up does not compile.
MORE = SamplingParams(
    presence_penalty=0.5,
    logprobs=1,
    prompt_logprobs=1,
    structured_outputs=StructuredOutputsParams(json_object=True),
)


def make_app(
    llm: AsyncLLM,
    settings: ServeSettings | None = None,
    *,
    name: str = "demo",
) -> FastAPI:
    """An app for any ASGI server; ``app.state.service`` is the state that its routes share.

    Args:
        llm: The engine; the app closes it at shutdown.
        settings: Server settings. The caller applies those about sockets, signals and warm-up.
        name: The model's name, unless the settings have names.

    Raises:
        ValueError: The settings ask for metrics of trees, and ``llm`` decodes plainly.
    """
    settings = ServeSettings() if settings is None else settings
    level = settings.per_request_spec_decode_metrics
    if level != "none" and not llm.num_spec_tokens:
        raise ValueError(
            f"per_request_spec_decode_metrics {level} needs trees, and this server decodes plainly: give a "
            "draft head and a budget above 1 (--draft-head, --budget)"
        )
    service = Service(llm, settings, name)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await service.trials.close()
            await llm.close()

    # FastAPI's documentation pages are off, because they load scripts from other hosts.
    app = FastAPI(
        title="jetspec-jax",
        version=__version__,
        root_path=settings.root_path,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=life,
        redirect_slashes=False,
        telemetry={"auto_configure": False},  # newer releases read FASTAPI_OTEL_AUTO_CONFIGURE
    )
    app.state.service = service
    routers = (
        _plain_routes(service),
        completion_routes(service),
        chat_routes(service),
        token_routes(service),
        playground_routes(service),
    )
    for router in routers:
        app.include_router(router)
    # From the routers, because newer releases of FastAPI do not list an app's routes individually.
    routes = [route for router in routers for route in router.routes]
    add_handlers(app, {route.path for route in routes if isinstance(route, Route)})
    # The middleware added last is outermost.
    app.add_middleware(Gate, service=service)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    app.add_middleware(Tracking, service=service)
    return app


async def warm_up(llm: AsyncLLM, settings: ServeSettings) -> None:
    """Compiles the programs of ``settings.warm_up``; the log says how many are left."""
    if settings.warm_up == "none":
        return
    started = time.monotonic()
    async with progress_lines(llm):
        await llm.warm_up()
        if settings.warm_up == "all":
            target = llm.llm.target
            grammars = target.tokenizer and not llm.has_workers
            await llm.warm_up(MORE if grammars else replace(MORE, structured_outputs=None))
    log("compiled", seconds=round(time.monotonic() - started, 2))


@asynccontextmanager
async def progress_lines(llm: AsyncLLM) -> AsyncIterator[None]:
    """Every `LINE_SECONDS` a line of the log says how many programs are left."""

    async def write() -> None:
        while True:
            await asyncio.sleep(LINE_SECONDS)
            log("compiling", programs_left=llm.stats().programs_left)

    lines = asyncio.create_task(write())
    try:
        yield
    finally:
        lines.cancel()


def _plain_routes(service: Service) -> APIRouter:
    """The routes that do not use the engine: models, health, version, metrics."""
    router = APIRouter()

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "jetspec-jax",
            "root": service.name,
            "parent": None,
            "max_model_len": service.llm.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(name) for name in service.names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return described(service.check_model(name))

    @router.get("/health")
    @router.get("/ping")
    async def health() -> Response:
        if service.llm.errored:
            message = "the last step of the engine failed; the next request restarts it"
            return ApiError(503, message, code="engine_error").response()
        if service.draining:
            return ApiError(503, "the server is shutting down", code="draining").response()
        left = service.llm.stats().programs_left
        return JSONResponse({"status": "ok", "warm": service.llm.warm, "programs_left": left})

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__, "jax": jax.__version__, "python": platform.python_version()}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router
