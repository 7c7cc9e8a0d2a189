"""Errors in OpenAI's form: an object with what is wrong, which parameter, and a code."""

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from jetspec_jax.arguments import nearest, printable, shortened, shown
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


def invalid(error: ValidationError, kind: type[BaseModel], hints: Mapping[str, str]) -> ApiError:
    """What is wrong with the first few fields of a request, and the first one's name.

    Args:
        error: Of the body's validation.
        kind: The body's model.
        hints: What to do instead of some fields that the model lacks.
    """
    said, param, code = [], None, None
    errors = error.errors(include_url=False, include_context=False)
    for one in errors[:MOST_FIELDS]:
        extra = one["type"] == "extra_forbidden"
        name = _name(one["loc"], extra=extra)
        if extra:
            told = _unknown(name, _fields_beside(kind, one["loc"]), hints)
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


def _fields_beside(kind: type[BaseModel], place: tuple[int | str, ...]) -> set[str]:
    """Names of the fields that a body has beside one of its places: of all models that may stand there."""
    kinds = [kind]
    for part in place[:-1]:
        # Indices and what pydantic adds for members of unions are no fields.
        fields = [
            own for kind in kinds for name, own in kind.model_fields.items() if part in (name, own.alias)
        ]
        if fields:
            kinds = [model for own in fields for model in _models_in(own.annotation)]
    return {own.alias or name for kind in kinds for name, own in kind.model_fields.items()}


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models among the types of which an annotation is made."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _unknown(name: str, known: Collection[str], hints: Mapping[str, str]) -> str:
    if name in hints:
        return f"{name} is not supported; {hints[name]}"
    near = nearest(name.rpartition(".")[2], known)
    advice = "leave it out" if near is None else f"did you mean {near}?"
    return f"{name} is no parameter that this server knows; {advice}"
