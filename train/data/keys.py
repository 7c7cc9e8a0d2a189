"""The keys of rows and of their messages: read, without meaning for training, or refused.

An unknown key may change what is to be learnt, for example exclude a part of it, so it is an error that names
the option to accept it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from train.data.messages import EXCLUDING, INCLUDING, REASONING, WEIGHT, is_excluded

#: The command-line option for ``ignore_data_keys``; it is repeated for each key.
IGNORE_DATA_OPTION = "--ignore-data-key"
#: The key of a conversation as ShareGPT has it.
CONVERSATIONS = "conversations"
#: The number of unknown keys that an error lists.
MOST_NAMED = 8

# Of a row of a data set, of a row of a log, and of a request's body.
_READ = frozenset(
    (
        *("messages", CONVERSATIONS, "text", "prompt", "tools", WEIGHT, *INCLUDING, *EXCLUDING),
        *("request", "response", "chunks", "custom_id", "body", "error"),
        *("chat_template_kwargs", "reasoning_effort", "verbosity"),
        *("continue_final_message", "add_generation_prompt", "echo", "suffix"),
    )
)
# Names, origins, times and counts.
_DESCRIPTION = frozenset(
    (
        *("id", "idx", "index", "uuid", "hash", "name", "title", "url", "version", "license", "author"),
        *("prompt_id", "conversation_id", "conversation_hash", "session_id", "request_id", "trace_id"),
        *("user", "user_id", "model", "model_name", "source", "dataset", "data_source", "origin", "subset"),
        *("category", "topic", "domain", "task", "tags", "lang", "language", "meta", "metadata", "method"),
        *("date", "time", "timestamp", "created", "created_at", "updated_at", "latency", "latency_ms"),
        *("turn", "num_turns", "num_tokens", "token_count", "usage"),
    )
)
# Parameters of a request that choose or describe its answer, but are no part of its prompt.
_GENERATION = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of", "use_beam_search", "budget"),
        *("max_tokens", "max_completion_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias"),
        *("bad_words", "allowed_token_ids", "response_format", "structured_outputs", "guided_json"),
        *("guided_regex", "guided_choice", "guided_grammar", "tool_choice", "parallel_tool_calls"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_rounds"),
        *("stream", "stream_options", "skip_special_tokens", "spaces_between_special_tokens"),
        *("include_stop_str_in_output", "include_reasoning", "service_tier", "store", "priority"),
        *("cache_salt", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction"),
        "modalities",
    )
)
_ROW = _READ | _DESCRIPTION | _GENERATION
_MESSAGE = frozenset(
    (
        *("role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call"),
        *(*REASONING, WEIGHT, *INCLUDING, *EXCLUDING),
        *("id", "model", "timestamp", "created_at", "refusal", "annotations", "audio"),
    )
)


def check_ignored(keys: Collection[str]) -> None:
    """Raises ValueError if a key to accept is known: it is read in any case."""
    if known := sorted({*keys} & (_ROW | _MESSAGE)):
        raise ValueError(f"{', '.join(known)} cannot be ignored: {IGNORE_DATA_OPTION} is for unknown keys")


def check_row(where: str, row: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Checks the keys of a row, of the request in it, and of its messages, but not of a response.

    Keys that are null count as absent, and those that begin with an underscore have no meaning.

    Args:
        where: File and line, for error messages.
        ignored: Unknown keys to accept.

    Raises:
        ValueError: A key is unknown, or the row is excluded from learning.
    """
    if not row.keys() & _READ:
        return  # the reader names the keys that are missing
    bodies = _bodies(row)
    unknown = {key for body in bodies for key in _unknown(body, _ROW, ignored)}
    if CONVERSATIONS in row:
        unknown -= {"system"}  # ShareGPT's
    messages = (message for body in bodies for message in _messages(body))
    unknown |= {key for message in messages for key in _unknown(message, _MESSAGE, ignored)}
    if unknown:
        keys = sorted(unknown)[:MOST_NAMED]
        more = f" and {len(unknown) - len(keys)} more" if len(unknown) > len(keys) else ""
        options = " ".join(f"{IGNORE_DATA_OPTION} {key}" for key in keys)
        raise ValueError(
            f"{where}: unknown keys {keys}{more} of the row or its messages; if none of them changes what is "
            f"to be learnt, pass ignore_data_keys={keys}, on the command line {options}"
        )
    if any(is_excluded(where, "the row", body) for body in bodies):
        raise ValueError(f"{where}: a key of the row excludes it from learning")


def _bodies(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A row, and the request in it, which may have its body under "body"."""
    bodies = [row]
    for name in ("request", "body"):
        if isinstance(inner := bodies[-1].get(name), Mapping):
            bodies.append(inner)
    return bodies


def _messages(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name in ("messages", CONVERSATIONS):
        if isinstance(messages := body.get(name), Sequence):
            yield from (message for message in messages if isinstance(message, Mapping))


def _unknown(value: Mapping[str, Any], known: Collection[str], ignored: Collection[str]) -> Iterator[str]:
    for key, item in value.items():
        if item is not None and key not in known and key not in ignored and not key.startswith("_"):
            yield key
