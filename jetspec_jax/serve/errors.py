"""Errors in OpenAI's form: an object with a message, a parameter and a code."""

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from jetspec_jax.arguments import NO_OTHER, nearest, printable, shortened, shown
from jetspec_jax.engine.request import DeadlinePassed, EngineFailed
from jetspec_jax.engine.scheduler import QueueFull

#: Unsupported paths of OpenAI's API, with advice.
ELSEWHERE = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/embeddings": "this server generates text: use /v1/completions or /v1/chat/completions",
    "/v1/audio": "this server reads and writes text alone",
    "/v1/images": "this server reads and writes text alone",
}
#: The status, in logs and metrics, of a request whose client has disconnected.
CLIENT_LEFT = 499
#: Most characters of a message, which may quote the request.
MOST_CHARACTERS = 2000
#: Most wrong fields of a request that are reported; the number of others is appended.
MOST_FIELDS = 8
# Most characters of the report of a field, and of a field's name.
_FIELD, _NAME = 200, 64
_KINDS = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """An error response.

    ``status`` is HTTP's, ``param`` the wrong parameter if there is a single one, and ``code``
    machine-readable.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """Shortens the message, and escapes unprintable characters."""
        message = shortened(printable(message), MOST_CHARACTERS)
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _KINDS.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def wrong(param: str, message: str) -> ApiError:
    """The response to a wrong value of a parameter."""
    return ApiError(400, message, param=param, code="invalid_value")


def add_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Adds handlers that give errors OpenAI's form; `Tracking` handles unexpected errors."""

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def of_route(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} takes {allowed}, not {request.method}"
            return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
        served = f"there are {', '.join(sorted(paths))}"
        advice = next((text for start, text in ELSEWHERE.items() if path.startswith(start)), served)
        return ApiError(404, f"{shown(path)} is not served here; {advice}", code="not_found").response()


def internal(error: BaseException) -> ApiError:
    """The response to an internal error of the server."""
    cause = error.__cause__ if isinstance(error, EngineFailed) and error.__cause__ else error
    return ApiError(
        500,
        f"the engine failed on this request ({type(cause).__name__}); it may be sent again",
        code="engine_error",
    )


def refused(
    error: Exception,
    names: Collection[str],
    default: str | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> ApiError:
    """The response to an error of a check; the parameter is the first one in the message.

    ``default`` is reported if the message has none of the ``names``. ``renamed`` has the request's names of
    parameters, by the names that checks use.
    """
    message = shortened(str(error), MOST_CHARACTERS)
    message = re.sub(r"\w+", lambda found: renamed.get(found[0], found[0]), message)
    places = {name: found.start() for name in names if (found := re.search(rf"\b{name}\b", message))}
    param = min(places, key=lambda name: places[name], default=default)
    return ApiError(400, message, param=param, code="invalid_value")


def of_generation(error: Exception, names: Collection[str], renamed: Mapping[str, str]) -> ApiError:
    """The response to an error of a generation; the names are for `refused`."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, DeadlinePassed):
        return ApiError(504, f"the request was not served in its time: {error}", code="deadline_passed")
    if isinstance(error, ValueError | TypeError):
        return refused(error, names, renamed=renamed)
    return internal(error)


def invalid(error: ValidationError, kind: type[BaseModel], hints: Mapping[str, str]) -> ApiError:
    """The response to an invalid body: the first few problems, and the first one's parameter."""
    messages, param, code = [], None, None
    errors = error.errors(include_url=False, include_context=False)
    for detail in errors[:MOST_FIELDS]:
        extra = detail["type"] == "extra_forbidden"
        name = _name(detail["loc"], extra=extra)
        if extra:
            text = _unknown(name, _fields_beside(kind, detail["loc"]), hints)
            detail_code = "unknown_parameter"
        elif detail["type"] == "missing":
            text = f"{name} is missing"
            detail_code = "missing_required_parameter"
        else:
            # "Input should be …", "String should match …", or the message of a `Body`.
            message, should, expected = detail["msg"].removeprefix("Value error, ").partition(" should ")
            text = (
                f"{name} should {expected}, not {shown(detail['input'])}" if should else f"{name} {message}"
            )
            detail_code = "invalid_type"
        if not messages:
            param, code = name if detail["loc"] else None, detail_code
        messages.append(shortened(text, _FIELD))
    messages = [*dict.fromkeys(messages)]
    if len(errors) > MOST_FIELDS:
        messages.append(f"and {len(errors) - MOST_FIELDS} more")
    return ApiError(400, "; ".join(messages), param=param, code=code)


def _name(place: tuple[int | str, ...], *, extra: bool) -> str:
    """A location in a body, such as ``messages[0].role``, without pydantic's tags for members of unions.

    These tags are names of types and classes. The first part is always a field, and so is the last part of an
    unknown field, which may be any text.
    """
    name = ""
    for number, part in enumerate(place, start=1):
        if isinstance(part, int):
            name += f"[{part}]"
        elif number == 1 or (extra and number == len(place)) or not _UNION_TAG.fullmatch(part):
            part = shortened(part, _NAME)
            name += f".{part}" if name else part
    return name or "the body"


# Fields begin with lower-case letters and have no brackets, unlike pydantic's tags.
_UNION_TAG = re.compile(r"str|int|float|bool|dict|list|[A-Z]\w*|.*\W.*", re.DOTALL)


def _fields_beside(kind: type[BaseModel], place: tuple[int | str, ...]) -> set[str]:
    """Names of the fields of all models that may be at the location of an unknown field."""
    kinds = [kind]
    for part in place[:-1]:
        # Indices and pydantic's tags for members of unions are not fields.
        fields = [
            info for kind in kinds for name, info in kind.model_fields.items() if part in (name, info.alias)
        ]
        if fields:
            kinds = [model for info in fields for model in _models_in(info.annotation)]
    return {info.alias or name for kind in kinds for name, info in kind.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models among the types in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _unknown(name: str, known: Collection[str], hints: Mapping[str, str]) -> str:
    if name in hints:
        return f"{name} is not supported; {hints[name]}"
    near = nearest(name.rpartition(".")[2], known)
    advice = NO_OTHER if near is None else f"did you mean {near}?"
    return f"{name} is not a parameter of this server; {advice}"
