"""Messages of requests, and the one way from them to a prompt."""

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

#: What to do instead of a template in a body.
TEMPLATE_HINT = {"chat_template": "the server has one for all requests: start it with --chat-template FILE"}


class CalledFunction(Body):
    """What a message called."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in a message of before."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """A message; what a response had may come back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Any = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Of OpenAI's own responses, without meaning here: null, or nothing to tell.
    refusal: str | None = None
    annotations: Any = None
    audio: None = None
    function_call: None = None

    def rendered(self) -> dict[str, Any]:
        """As templates read it: the arguments of calls are mappings."""
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
    """Checks that messages can be written, and tools with them.

    Raises:
        ApiError: There is no chat template, or it does not write tools.
    """
    tokenizer = service.llm.llm.target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        message = (
            "this model has no chat template, so that no chat can be written: use /v1/completions, or start "
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
    """Messages as the tokens of the model's chat template.

    Args:
        service: What serves the model.
        messages: A conversation.
        tools: Those that the template writes.
        template_arguments: What a request gives the template.
        reasoning_effort: As the template has it; None leaves it to the template. The server logs once if
            the template does not read it.
        verbosity: Likewise.
        add_generation_prompt: As for `LLM.chat`, as is the next.
        continue_final_message: Whether the prompt ends in the last message.

    Raises:
        ApiError: What cannot be written, and why.
    """
    check_template(service, tools)
    arguments = dict(template_arguments or {})
    try:
        check_template_arguments(arguments)
        if "tools" in arguments:
            raise ValueError("tools cannot be template arguments: give them as tools of the request")
    except ValueError as error:
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
    """The arguments of a call, nested no more deeply than bodies may be."""
    value = read_arguments(text)
    check_levels(value)
    return value
