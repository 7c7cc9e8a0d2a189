"""The server's settings, validated; needs none of the server's libraries."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspec_jax.arguments import check_flag, check_integer, check_number, check_text, check_type, shown
from jetspec_jax.serve.parsers import MESSAGE_CALLS, MESSAGES, REASONING, TOOL_CALLS

#: Scheduling policies: in order of arrival, or by the ``priority`` of requests.
POLICIES = ("fcfs", "priority")
#: Sets of programs to compile before the server listens.
WARM_UPS = ("none", "usual", "all")
#: Levels of `metrics.speculative_decoding` in answers.
SPEC_DECODE_METRICS = ("none", "summary", "detailed")
#: Levels of uvicorn's log.
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


@dataclass(frozen=True)
class ServeSettings:
    """The server's settings. Most names are those of vLLM's options.

    Attributes:
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        api_key: API keys, of which a request must have one; empty: no key is needed.
        served_model_name: Names of the model, the first of which is used in responses; empty: the target's.
        uvicorn_log_level: Log level of uvicorn.
        disable_access_log: Whether not to log each request.
        allowed_origins: CORS: allowed origins, or "*".
        allowed_methods: CORS: allowed methods.
        allowed_headers: CORS: allowed headers.
        allow_credentials: CORS: whether cookies are allowed.
        root_path: The path prefix that a proxy removes.
        tool_call_parser: The format of tool calls in the model's text; None refuses requests in which the
            model may choose to call tools.
        reasoning_parser: The format of reasoning in the model's text; None leaves reasoning in the text.
        scheduling_policy: "fcfs", or "priority", with which requests may have a priority.
        per_request_spec_decode_metrics: The acceptance of drafted tokens in answers: "none", "summary", or
            "detailed", which adds each round's.
        warm_up: Programs to compile at the start: "none", "usual", or "all", which adds those for masks,
            penalties, log-probabilities and grammars.
        max_body_bytes: Most bytes of a request's body.
        max_prompt_tokens: Most tokens of a prompt; None: limited only by the context.
        max_completions: Most completions of a request: prompts times ``n``.
        max_grammar_bytes: Most bytes of a schema, grammar, regular expression, or list of choices.
        max_grammar_seconds: Most processor time to compile one of these.
        max_requests_per_key: Most requests of a key at the same time; None: no limit.
        request_timeout: Seconds until a request must be complete after it was checked; None: no limit.
        body_timeout: Seconds for a client to send headers, and again to send the body.
        send_timeout: Seconds that a client may stop reading a response.
        drain_seconds: Seconds for running requests to end when the server shuts down.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] = ()
    served_model_name: Sequence[str] = ()
    uvicorn_log_level: str = "warning"
    disable_access_log: bool = False
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    scheduling_policy: str = POLICIES[0]
    per_request_spec_decode_metrics: str = SPEC_DECODE_METRICS[0]
    warm_up: str = "usual"
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None
    max_completions: int = 128
    max_grammar_bytes: int = 2**16
    max_grammar_seconds: float = 5.0
    max_requests_per_key: int | None = None
    request_timeout: float | None = None
    body_timeout: float = 30.0
    send_timeout: float = 60.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        check_integer("port", self.port, 0, 2**16 - 1)
        for name in ("host", "root_path"):
            check_type(name, getattr(self, name), str, "a text")
        for name in ("disable_access_log", "allow_credentials"):
            check_flag(name, getattr(self, name))
        for name in ("max_body_bytes", "max_completions", "max_grammar_bytes"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_prompt_tokens", "max_requests_per_key"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        for name in ("max_grammar_seconds", "request_timeout", "body_timeout", "send_timeout"):
            _check_seconds(name, getattr(self, name), above_zero=True)
        _check_seconds("drain_seconds", self.drain_seconds, above_zero=False)
        for name in ("api_key", "served_model_name", "allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        for key in self.api_key:
            if any(ord(c) < 0x20 or ord(c) == 0x7F for c in key):
                raise ValueError(
                    "api_key must hold keys without control characters, which headers cannot have"
                )
        for name, words in (
            ("uvicorn_log_level", LOG_LEVELS),
            ("scheduling_policy", POLICIES),
            ("per_request_spec_decode_metrics", SPEC_DECODE_METRICS),
            ("warm_up", WARM_UPS),
            ("tool_call_parser", (None, *TOOL_CALLS)),
            ("reasoning_parser", (None, *REASONING)),
        ):
            if (value := getattr(self, name)) not in words:
                known = ", ".join(str(word) for word in words if word is not None)
                raise ValueError(f"{name} must be one of {known}, not {shown(value)}")
        if self.tool_call_parser == MESSAGE_CALLS and self.reasoning_parser != MESSAGES:
            raise ValueError(f"tool_call_parser {MESSAGE_CALLS} needs reasoning_parser {MESSAGES}: give both")
        if self.max_requests_per_key is not None and not self.api_key:
            raise ValueError("max_requests_per_key needs keys to tell clients apart: give some as api_key")


def _check_seconds(name: str, value: Any, *, above_zero: bool) -> None:
    if value is None and name == "request_timeout":
        return
    seconds = check_number(name, value)
    if not (seconds > 0 or (seconds == 0 and not above_zero)) or seconds > 1e9:
        least = "above 0" if above_zero else "0 or more"
        raise ValueError(f"{name} must be {least} seconds, at most 1e9, not {shown(value)}")


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """A tuple of non-empty texts; texts are split at commas."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of texts, not {shown(values)}")
    parts = []
    for value in values:
        check_type(f"a text in {name}", value, str, "a text")
        check_text(name, value)
        parts += [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError(f"{name} must hold texts that are not empty")
    return tuple(parts)
