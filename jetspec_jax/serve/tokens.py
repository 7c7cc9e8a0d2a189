"""``/tokenize`` and ``/detokenize``, as in vLLM."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from jetspec_jax.engine.prompts import check_ids
from jetspec_jax.serve.bodies import Body, Listed, read_body
from jetspec_jax.serve.errors import ApiError, refused, wrong
from jetspec_jax.serve.messages import Message, TemplateFields, encode_messages
from jetspec_jax.serve.service import Service


class TokenizeRequest(TemplateFields):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[Message] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Body):
    """Tokens to detokenize."""

    model: str | None = None
    tokens: Listed[int]


def token_routes(service: Service) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, TokenizeRequest, service.settings)
        service.check_model(body.model)
        tokenizer = _tokenizer(service)
        if (body.prompt is None) == (body.messages is None):
            raise wrong("prompt", "give either prompt or messages")
        ids = await asyncio.to_thread(_encode, service, body)
        made = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
        if body.return_token_strs:
            made["token_strs"] = tokenizer.convert_ids_to_tokens(ids)
        return made

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await read_body(request, DetokenizeRequest, service.settings)
        service.check_model(body.model)
        tokenizer = _tokenizer(service)
        try:
            ids = check_ids(body.tokens, "tokens", service.llm.llm.target.config.vocab_size)
        except (TypeError, ValueError) as error:
            raise refused(error, ("tokens",), "tokens") from error
        return {"prompt": await asyncio.to_thread(tokenizer.decode, ids.tolist())}

    return router


def _tokenizer(service: Service) -> Any:
    tokenizer = service.llm.llm.target.tokenizer
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; send token ids", code="unsupported")
    return tokenizer


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        tokenizer = service.llm.llm.target.tokenizer
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    return encode_messages(service, body.messages, body, body.tools or []).ids.tolist()
