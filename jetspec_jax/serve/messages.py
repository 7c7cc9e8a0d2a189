"""Messages of requests, and their encoding as a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jetspec_jax.checkpoint.chat_template import (
    Ending,
    check_template_arguments,
    check_writes_tools,
    read_arguments,
    read_chats,
    unread,
)
from jetspec_jax.engine.prompts import EncodedPrompt, encode_chat
from jetspec_jax.serve.bodies import Body, Listed, check_levels
from jetspec_jax.serve.errors import ApiError, refused
from jetspec_jax.serve.service import Service
from jetspec_jax.serve.tools import Tool

#: Advice for a chat template in a body.
TEMPLATE_HINT = {"chat_template": "the server has one for all requests: start it with --chat-template FILE"}


class CalledFunction(Body):
    """The function of a tool call."""

    name: str
    arguments: str


class ToolCall(Body):
    """A tool call in an earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """A message; also accepts the fields of messages in responses."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Fields of OpenAI's responses without effect here.
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None

    def rendered(self) -> dict[str, Any]:
        """The message for a template, with arguments of calls as mappings."""
        made: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        if self.tool_calls:
            made["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return made


def check_template(service: Service, tools: Sequence[Tool] = ()) -> None:
    """Checks that the model has a chat template, and that the template supports tools if there are any.

    Raises:
        ApiError: There is no chat template, or it does not support tools.
    """
    tokenizer = service.llm.llm.target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        message = (
            "this model has no chat template, which chats need: use /v1/completions, or start "
            "the server with --chat-template FILE"
        )
        raise ApiError(400, message, param="messages", code="unsupported")
    if tools:
        try:
            check_writes_tools(tokenizer)
        except ValueError as error:
            raise ApiError(400, str(error), param="tools", code="unsupported") from error


def encode_messages(
    service: Service,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    template_arguments: Mapping[str, Any] | None = None,
    reasoning_effort: str | None = None,
    verbosity: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
) -> EncodedPrompt:
    """Encodes messages with the model's chat template.

    Args:
        service: The service.
        messages: A conversation.
        tools: The tools for the template.
        template_arguments: Further arguments of the template.
        reasoning_effort: An argument of the template; None uses the template's default. If the template does
            not use it, the server logs a warning once.
        verbosity: Likewise.
        add_generation_prompt: As for `LLM.chat`.
        continue_final_message: As for `LLM.chat`.

    Raises:
        ApiError: The messages cannot be encoded.
    """
    check_template(service, tools)
    arguments = dict(template_arguments or {})
    try:
        if "tools" in arguments:
            raise ValueError("tools cannot be template arguments: give them as tools of the request")
        check_template_arguments(arguments)
    except (TypeError, ValueError) as error:
        raise refused(error, (), "chat_template_kwargs") from error
    if tools:
        arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    styles = {"reasoning_effort": reasoning_effort, "verbosity": verbosity}
    styles = {name: value for name, value in styles.items() if value is not None}
    arguments |= styles
    try:
        ending = Ending.of(add_generation_prompt, continue_final_message)
        [chat] = read_chats([message.rendered() for message in messages])
        target = service.llm.llm.target
        encoded = encode_chat(target, chat, arguments, ending)
    except (TypeError, ValueError) as error:
        raise refused(error, ("continue_final_message",), "messages") from error
    for name in unread(target.tokenizer, arguments, styles):
        service.warn_once(f"the chat template does not read {name}: it has no effect")
    return encoded


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call, with the nesting limit of bodies."""
    value = read_arguments(text)
    check_levels(value)
    return value
