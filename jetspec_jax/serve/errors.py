"""Errors in OpenAI's form: an object with what is wrong, which parameter, and a code."""

import difflib
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from jetspec_jax.arguments import printable, shortened, shown
from jetspec_jax.engine.line import QueueFull
from jetspec_jax.engine.request import DeadlinePassed, EngineFailed

#: Paths of OpenAI's API that are not served, and what is instead.
ELSEWHERE = {
    "/v1/responses": "use /v1/chat/completions",
    "/v1/embeddings": "this server generates text: use /v1/completions or /v1/chat/completions",
    "/v1/audio": "this server reads and writes text alone",
    "/v1/images": "this server reads and writes text alone",
}
#: The status, in the log and the metrics, of a request whose client has left; nobody reads it.
CLIENT_LEFT = 499
#: Characters of a message, whatever it repeats of what was sent.
MOST_CHARACTERS = 2000
#: Wrong fields of a request that are told; how many more there are is told too.
MOST_FIELDS = 8
# Characters of what is told of one, and of a field's name.
_FIELD, _NAME = 200, 64
_KINDS = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error", 504: "timeout_error"}


class ApiError(Exception):
    """What a client is told instead of an answer.

    Attributes:
        status: Of the response.
        message: What is wrong, and what would work.
        param: The parameter that is meant; None for no single one.
        code: A word for programs.
        headers: Of the response.
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
        """Takes what the attributes say."""
        message = shortened(printable(message), MOST_CHARACTERS)
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The object that is sent."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": _KINDS.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The response that is sent."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def add_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Gives errors of an app OpenAI's form; `Tracking` does so with those that nobody expects.

    Args:
        app: The app.
        paths: All that it serves.
    """

    async def known(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        return error.response()

    async def of_route(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return _of_route(paths, request, error).response()

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(HTTPException, of_route)


def _of_route(paths: Collection[str], request: Request, error: HTTPException) -> ApiError:
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path} takes {allowed}, not {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers)
    advice = next((own for start, own in ELSEWHERE.items() if path.startswith(start)), None)
    if advice is None:
        advice = f"there are {', '.join(sorted(paths))}"
    return ApiError(404, f"{shown(path)} is not served here; {advice}", code="not_found")


def internal(error: BaseException) -> ApiError:
    """What is told of an error that is the server's."""
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
    """A check's complaint about what a client asked for; the parameter is the first one that it names.

    Args:
        error: What the check has raised.
        names: Parameters of the request.
        default: The parameter that is meant where the complaint names none.
        renamed: What the client called those that the check knows by other names.
    """
    message = shortened(str(error), MOST_CHARACTERS)
    message = re.sub(r"\w+", lambda found: renamed.get(found[0], found[0]), message)
    places = {name: found.start() for name in names if (found := re.search(rf"\b{name}\b", message))}
    param = min(places, key=lambda name: places[name], default=default)
    return ApiError(400, message, param=param, code="invalid_value")


def of_generation(error: Exception, names: Collection[str], renamed: Mapping[str, str]) -> ApiError:
    """What is told of an error of a generation; the names are for `refused`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, DeadlinePassed):
        return ApiError(504, f"the request was not served in its time: {error}", code="deadline_passed")
    if isinstance(error, ValueError | TypeError):
        return refused(error, names, renamed=renamed)
    return internal(error)


def invalid(error: ValidationError, known: Collection[str], hints: Mapping[str, str]) -> ApiError:
    """What is wrong with the first few fields of a request, and the first one's name.

    Args:
        error: Of the model.
        known: Names of its fields.
        hints: What to do instead of some that it lacks.
    """
    said, param, code = [], None, None
    errors = error.errors(include_url=False, include_context=False)
    for one in errors[:MOST_FIELDS]:
        extra = one["type"] == "extra_forbidden"
        name = _name(one["loc"], extra=extra)
        if extra:
            told = _unknown(name, known if len(one["loc"]) == 1 else (), hints)
            one_code = "unknown_parameter"
        elif one["type"] == "missing":
            told = f"{name} is missing"
            one_code = "missing_required_parameter"
        else:
            # "Input should be …", "String should match …", or what a `Body` itself says.
            message, should, what = one["msg"].removeprefix("Value error, ").partition(" should ")
            told = f"{name} should {what}, not {shown(one['input'])}" if should else f"{name} {message}"
            one_code = "invalid_type"
        if not said:
            param, code = name if one["loc"] else None, one_code
        said.append(shortened(told, _FIELD))
    said = [*dict.fromkeys(said)]
    if len(errors) > MOST_FIELDS:
        said.append(f"and {len(errors) - MOST_FIELDS} more")
    return ApiError(400, "; ".join(said), param=param, code=code)


def _name(place: tuple[int | str, ...], *, extra: bool) -> str:
    """A place in a body, as ``messages[0].role``; without what pydantic adds for members of unions.

    Such are types and classes. A first part is a field, and so is the last one where that is an extra one,
    which may be any text.
    """
    name = ""
    for number, part in enumerate(place, start=1):
        if isinstance(part, int):
            name += f"[{part}]"
        elif number == 1 or (extra and number == len(place)) or not _UNION_TAG.fullmatch(part):
            part = shortened(part, _NAME)
            name += f".{part}" if name else part
    return name or "the body"


# Fields begin with small letters, and have no brackets.
_UNION_TAG = re.compile(r"str|int|float|bool|dict|list|[A-Z]\w*|.*\W.*", re.DOTALL)


def _unknown(name: str, known: Collection[str], hints: Mapping[str, str]) -> str:
    if name in hints:
        return f"{name} is not supported; {hints[name]}"
    near = difflib.get_close_matches(name, known, 1) if len(name) < _NAME else ()
    advice = f"did you mean {near[0]}?" if near else "leave it out"
    return f"{name} is no parameter that this server knows; {advice}"
