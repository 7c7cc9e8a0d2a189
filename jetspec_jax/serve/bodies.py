"""Reads request bodies within limits, and validates all fields."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from jetspec_jax.arguments import check_text, shown
from jetspec_jax.serve.errors import CLIENT_LEFT, ApiError, invalid
from jetspec_jax.serve.settings import ServeSettings


class Body(BaseModel):
    """Base class of request bodies: only the declared fields, strictly typed; null counts as absent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    #: Advice for unsupported fields of other servers.
    hints: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Removes fields that are null, and refuses very many unknown fields with one error."""
        if not isinstance(value, dict):
            return value
        given = {name: field for name, field in value.items() if field is not None}
        if len(given) > (most := len(cls.model_fields) + _MORE):
            raise ValueError(f"has {len(given)} fields, and more than {most} are not read")
        return given


Item = TypeVar("Item")
#: A list in a body whose validation stops at the first wrong item, because there may be a million.
Listed = Annotated[list[Item], Field(fail_fast=True)]
# Unknown fields that are reported individually.
_MORE = 32
# Levels of nesting in a body, because later code may recurse once per level.
_LEVELS = 100
# Larger bodies are parsed in a thread, outside the event loop.
_LARGE = 2**16
BodyType = TypeVar("BodyType", bound=Body)


async def read_body(request: Request, kind: type[BodyType], settings: ServeSettings) -> BodyType:
    """Reads and validates the body of a request."""
    body = await _read(request, settings)
    return await asyncio.to_thread(_checked, body, kind) if len(body) > _LARGE else _checked(body, kind)


def _checked(body: bytes, kind: type[BodyType]) -> BodyType:
    value = _json(body)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    for name, field in value.items():
        try:
            check_text("a name in the body", name)
            for text in _texts(field):
                check_text(name, text)
        except ValueError as error:
            param = name if name in kind.model_fields else None
            raise ApiError(400, str(error), param=param, code="invalid_unicode") from error
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise invalid(error, kind, kind.hints) from error


async def _read(request: Request, settings: ServeSettings) -> bytes:
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"the content type must be application/json, not {shown(kind) if kind else 'missing'}",
            code="unsupported_media_type",
        )
    most = settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {settings.body_timeout:g} seconds; send it faster",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        # Also after invalid HTTP, for which the protocol has sent a response already.
        raise ApiError(CLIENT_LEFT, "the client left before its body was complete", code="left") from None
    return bytes(body)


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than {most} bytes, which is the most that this server reads"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})


def _json(body: bytes) -> Any:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        message = f"the body is no valid UTF-8: byte {error.start} is 0x{body[error.start]:02x}"
        raise ApiError(400, message, code="invalid_unicode") from error
    try:
        return read_json(text, unique=True)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        # Python's message mentions a setting of this process.
        reason = "an integer has too many digits" if "sys.set_int_max_str_digits" in str(error) else error
        raise ApiError(400, f"the body is no valid JSON: {reason}", code="invalid_json") from error


def read_json(text: str, *, strict: bool = True, unique: bool = False) -> Any:
    """Parses JSON whose numbers must all be finite.

    ``strict`` strings escape control characters, and the names of an object differ if ``unique``.
    """
    pairs = _unique if unique else None
    return json.loads(
        text, parse_constant=_no_number, parse_float=_finite, strict=strict, object_pairs_hook=pairs
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        [(name, count)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"an object has {shown(name)} {count} times")
    return made


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:32]} lies beyond all floats")
    return value


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def check_levels(value: Any) -> None:
    """Refuses a JSON value that was a string in a body and is nested more deeply than bodies may be."""
    for _ in _texts(value):
        pass


def _texts(value: Any) -> Iterable[str]:
    """All strings in a JSON value, including keys; refuses one that is nested too deeply."""
    left = [(value, 2)]  # the body itself is level 1
    while left:
        item, level = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict | list):
            if level > _LEVELS:
                raise _too_deep()
            if isinstance(item, dict):
                yield from item
            left += ((inner, level + 1) for inner in (item.values() if isinstance(item, dict) else item))


def _too_deep() -> ApiError:
    message = f"the body is nested too deeply; at most {_LEVELS} levels are read"
    return ApiError(400, message, code="invalid_json")
