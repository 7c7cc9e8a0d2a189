"""Bodies of requests: read within bounds, and checked down to the last field."""

import asyncio
import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import ClientDisconnect

from jetspec_jax.arguments import check_text, shown
from jetspec_jax.serve.errors import CLIENT_LEFT, ApiError, invalid
from jetspec_jax.serve.settings import ServeSettings


class Body(BaseModel):
    """What a request may hold: these fields, of exactly these types. Null stands for a field left out."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    #: What to do instead of fields that other servers know.
    hints: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Leaves out fields that are null, known or not, and refuses very many unknown fields as one."""
        if not isinstance(value, dict):
            return value
        given = {name: own for name, own in value.items() if own is not None}
        if len(given) > (most := len(cls.model_fields) + _MORE):
            raise ValueError(f"has {len(given)} fields, and more than {most} are not read")
        return given


Item = TypeVar("Item")
#: A list in a body, of which one wrong item is told: a large body may hold a million.
Listed = Annotated[list[Item], Field(fail_fast=True)]
# Unknown fields that are told one by one.
_MORE = 32
# Levels of a body: what reads it further on may call itself for each.
_LEVELS = 100
# Bytes of a body that is read beside the event loop.
_LARGE = 2**16
Own = TypeVar("Own", bound=Body)


async def read_body(request: Request, kind: type[Own], settings: ServeSettings) -> Own:
    """The body of a request.

    Raises:
        ApiError: It is too large or too slow, no JSON of this kind, or the client has left.
    """
    body = await _read(request, settings)
    return await asyncio.to_thread(_checked, body, kind) if len(body) > _LARGE else _checked(body, kind)


def _checked(body: bytes, kind: type[Own]) -> Own:
    value = _json(body)
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    for name, own in value.items():
        try:
            check_text("a name in the body", name)
            for text in _texts(own):
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
        # Also who sends what is no HTTP: the protocol has told them so.
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
        return read_json(text)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        # Python's own words name a setting of this process.
        said = "an integer has too many digits" if "sys.set_int_max_str_digits" in str(error) else error
        raise ApiError(400, f"the body is no valid JSON: {said}", code="invalid_json") from error


def read_json(text: str, *, strict: bool = True) -> Any:
    """A JSON value whose numbers are all finite.

    Args:
        text: The value.
        strict: Whether strings must escape control characters such as line feeds.

    Raises:
        ValueError: The text is no such value.
        RecursionError: It is nested too deeply.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite, strict=strict)


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
    """Checks a JSON value that came as text in a body: it may not be nested more deeply than bodies may.

    Raises:
        ApiError: It is.
    """
    for _ in _texts(value):
        pass


def _texts(value: Any) -> Iterable[str]:
    """All texts in a JSON value, names of fields too.

    Raises:
        ApiError: It is nested too deeply.
    """
    left = [(value, 2)]  # the body is the first
    while left:
        own, level = left.pop()
        if isinstance(own, str):
            yield own
        elif isinstance(own, dict | list):
            if level > _LEVELS:
                raise _too_deep()
            if isinstance(own, dict):
                yield from own
            left += ((inner, level + 1) for inner in (own.values() if isinstance(own, dict) else own))


def _too_deep() -> ApiError:
    message = f"the body is nested too deeply; at most {_LEVELS} levels are read"
    return ApiError(400, message, code="invalid_json")
