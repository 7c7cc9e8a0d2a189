"""The options of ``jetspec-jax serve``, in addition to those of models and trees."""

from dataclasses import replace

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.cli.options import MODELS, Group, Option
from jetspec_jax.engine.size import DEFAULT_CAPACITY
from jetspec_jax.serve.parsers import REASONING, TOOL_CALLS
from jetspec_jax.serve.settings import LOG_LEVELS, POLICIES, SPEC_DECODE_METRICS, WARM_UPS, ServeSettings

SERVER = Group(
    "the server",
    ServeSettings,
    (
        Option("host", "address to listen on", metavar="ADDRESS"),
        Option("port", "port to listen on; 0 is any free port", int),
        Option("api_key", "key that requests must have; repeatable", metavar="KEY", recurs=True),
        Option(
            "served_model_name", "name of the model; repeatable", metavar="NAME", recurs=True, unset="MODEL"
        ),
        Option("uvicorn_log_level", "level of uvicorn's log", metavar="LEVEL", words=LOG_LEVELS),
        Option("disable_access_log", "do not log each request", flag="--disable-uvicorn-access-log"),
        Option(
            "allowed_origins",
            "origins of web pages that may send requests, or *; repeatable",
            metavar="ORIGIN",
            recurs=True,
        ),
        Option(
            "allowed_methods", "methods that web pages may use; repeatable", metavar="METHOD", recurs=True
        ),
        Option(
            "allowed_headers", "headers that web pages may send; repeatable", metavar="HEADER", recurs=True
        ),
        Option("allow_credentials", "allow web pages to send cookies"),
        Option("root_path", "path prefix that a proxy removes", metavar="PATH"),
        Option(
            "tool_call_parser",
            f"format of tool calls in the text: {', '.join(TOOL_CALLS)}",
            metavar="NAME",
            words=tuple(TOOL_CALLS),
        ),
        Option(
            "reasoning_parser",
            f"format of reasoning in the text: {', '.join(REASONING)}",
            metavar="NAME",
            words=tuple(REASONING),
        ),
        Option(
            "scheduling_policy",
            f"order of the waiting queue: {' or '.join(POLICIES)}",
            metavar="NAME",
            words=POLICIES,
        ),
        Option(
            "per_request_spec_decode_metrics",
            f"acceptance of drafted tokens in answers: {', '.join(SPEC_DECODE_METRICS)}",
            metavar="LEVEL",
            words=SPEC_DECODE_METRICS,
        ),
        Option(
            "warm_up",
            f"programs compiled at the start: {', '.join(WARM_UPS)}",
            metavar="WHAT",
            words=WARM_UPS,
        ),
        Option("max_body_bytes", "most bytes of a request's body", int),
        Option("max_prompt_tokens", "most tokens of a prompt", int, unset="the context's"),
        Option("max_completions", "most completions of a request: prompts times n", int),
        Option("max_grammar_bytes", "most bytes of a schema, a grammar or a regular expression", int),
        Option(
            "max_grammar_seconds", "most processor seconds to compile one of these", float, metavar="SECONDS"
        ),
        Option(
            "max_requests_per_key", "most running and waiting requests per API key", int, unset="no bound"
        ),
        Option("request_timeout", "most seconds of a request", float, metavar="SECONDS", unset="no bound"),
        Option(
            "body_timeout",
            "most seconds to receive the headers, and again the body",
            float,
            metavar="SECONDS",
        ),
        Option("send_timeout", "most seconds in which a client reads nothing", float, metavar="SECONDS"),
        Option(
            "drain_seconds", "seconds for running requests after a signal to stop", float, metavar="SECONDS"
        ),
    ),
)

# Options of `LLM` with other defaults.
_MODELS = {option.field: option for option in MODELS.options}
ENGINE = Group(
    "the engine",
    AsyncLLM,
    (
        replace(
            _MODELS["max_slots"],
            help="requests that decode at once, per copy",
            unset="as many as fit into memory, up to 256; 8 on a CPU",
        ),
        replace(
            _MODELS["capacity"],
            help="most tokens of prompt and output",
            unset=f"on a GPU the model's context, or what fits; {DEFAULT_CAPACITY} on a CPU",
        ),
        Option("max_waiting", "longest waiting queue, per copy", int),
    ),
)

#: The options of the server's command.
SERVING = (SERVER, ENGINE)
