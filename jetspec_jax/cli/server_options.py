"""The options of ``jetspec-jax serve`` beside those of models and trees."""

from dataclasses import replace

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.cli.options import MODELS, Group, Option
from jetspec_jax.engine.size import DEFAULT_CAPACITY
from jetspec_jax.serve.parsers import REASONING, TOOL_CALLS
from jetspec_jax.serve.settings import LOG_LEVELS, POLICIES, WARM_UPS, ServeSettings

SERVER = Group(
    "the server",
    ServeSettings,
    (
        Option("host", "address to listen on", metavar="ADDRESS"),
        Option("port", "port to listen on; 0 is any that is free", int, metavar="N"),
        Option("api_key", "key that requests must have; may recur", metavar="KEY", recurs=True),
        Option(
            "served_model_name", "name of the model; may recur", metavar="NAME", recurs=True, unset="MODEL"
        ),
        Option("uvicorn_log_level", "of uvicorn's own log", metavar="LEVEL", words=LOG_LEVELS),
        Option(
            "disable_access_log", "no line in the log for each request", flag="--disable-uvicorn-access-log"
        ),
        Option("allowed_origins", "web pages that may ask, or *; may recur", metavar="ORIGIN", recurs=True),
        Option("allowed_methods", "methods that they may use; may recur", metavar="METHOD", recurs=True),
        Option("allowed_headers", "headers that they may send; may recur", metavar="HEADER", recurs=True),
        Option("allow_credentials", "they may send cookies"),
        Option("root_path", "what a proxy takes off the front of paths", metavar="PATH"),
        Option(
            "tool_call_parser",
            f"how calls of tools look in the text: {', '.join(TOOL_CALLS)}",
            metavar="NAME",
            words=TOOL_CALLS,
        ),
        Option(
            "reasoning_parser",
            f"how reasoning looks in the text: {', '.join(REASONING)}",
            metavar="NAME",
            words=tuple(REASONING),
        ),
        Option("scheduling_policy", f"{' or '.join(POLICIES)}", metavar="NAME", words=POLICIES),
        Option("warm_up", f"compiled at the start: {', '.join(WARM_UPS)}", metavar="WHAT", words=WARM_UPS),
        Option("max_body_bytes", "of a request", int, metavar="N"),
        Option("max_prompt_tokens", "of a prompt", int, metavar="N", unset="the context's"),
        Option("max_completions", "of a request: prompts times n", int, metavar="N"),
        Option("max_grammar_bytes", "of a schema, a grammar, or a regular expression", int, metavar="N"),
        Option("max_grammar_seconds", "of a processor, to compile one of these", float, metavar="SECONDS"),
        Option("max_requests_per_key", "that run or wait at once", int, metavar="N", unset="no bound"),
        Option("request_timeout", "seconds that a request has", float, metavar="SECONDS", unset="no bound"),
        Option("body_timeout", "for headers, and again for the body", float, metavar="SECONDS"),
        Option("send_timeout", "that a client may read nothing", float, metavar="SECONDS"),
        Option("drain_seconds", "for running requests, once told to stop", float, metavar="SECONDS"),
    ),
)

# As `LLM` has them, with other defaults.
_MODELS = {option.field: option for option in MODELS.options}
ENGINE = Group(
    "the engine",
    AsyncLLM,
    (
        replace(
            _MODELS["max_slots"],
            help="requests that decode at once, with each copy",
            unset="what memory has room for, up to 256; 8 on a CPU",
        ),
        replace(_MODELS["capacity"], help="tokens of prompt and output", unset=str(DEFAULT_CAPACITY)),
        Option("max_waiting", "requests that may wait for a slot, with each copy", int, metavar="N"),
    ),
)

#: What the server's command is told beside models and trees.
SERVING = (SERVER, ENGINE)
