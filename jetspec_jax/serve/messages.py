"""Messages of requests, and their encoding as a prompt."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

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
        made |= self.model_dump(include={"name", "tool_call_id", "reasoning_content"}, exclude_none=True)
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


class TemplateFields(Body):
    """Fields of requests for the model's chat template."""

    tools: Listed[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    hints: ClassVar[dict[str, str]] = {
        "chat_template": "the server has one for all requests: start it with --chat-template FILE"
    }


def check_template(service: Service, tools: Sequence[Tool] = ()) -> None:
    """Checks that the model has a chat template, and that the template supports tools if there are any."""
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
    service: Service, messages: Sequence[Message], fields: TemplateFields, tools: Sequence[Tool] = ()
) -> EncodedPrompt:
    """Encodes messages with the model's chat template.

    If the template does not read ``reasoning_effort`` or ``verbosity``, the server logs a warning once.
    """
    check_template(service, tools)
    arguments = dict(fields.chat_template_kwargs or {})
    try:
        if "tools" in arguments:
            raise ValueError("tools cannot be template arguments: give them as tools of the request")
        check_template_arguments(arguments)
    except (TypeError, ValueError) as error:
        raise refused(error, (), "chat_template_kwargs") from error
    if tools:
        arguments["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    styles = fields.model_dump(include={"reasoning_effort", "verbosity"}, exclude_none=True)
    arguments |= styles
    try:
        ending = Ending.of(fields.add_generation_prompt, fields.continue_final_message)
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
