"""A tool that the model has to call, its result, and an answer: a server and OpenAI's client.

``python examples/call_a_tool.py`` beside ``jetspec-jax serve smollm2 --chat-template chatml-tools``
"""

import argparse
import importlib
import inspect
import json

from openai import OpenAI

parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server")
parser.add_argument("--max-tokens", type=int, default=64)
arguments = parser.parse_args()


def count_names(module: str, kind: str) -> int:
    """How many classes or functions a module has."""
    is_one = {"class": inspect.isclass, "function": inspect.isroutine}[kind]
    return sum(map(is_one, vars(importlib.import_module(module)).values()))


schema = {
    "type": "object",
    "properties": {"module": {"enum": ["json", "math", "os"]}, "kind": {"enum": ["class", "function"]}},
    "required": ["module", "kind"],
    "additionalProperties": False,
}
tool = {"type": "function", "function": {"name": "count_names", "parameters": schema}}
client = OpenAI(base_url=arguments.url, api_key="none")
[model] = [own.id for own in client.models.list()]
asked = {"model": model, "tools": [tool], "max_tokens": arguments.max_tokens, "temperature": 0}
messages = [{"role": "user", "content": "How many functions does the module math have?"}]

# A function that is named is called whatever the model is: the schema says which tokens may follow.
choice = {"type": "function", "function": {"name": "count_names"}}
message = client.chat.completions.create(messages=messages, tool_choice=choice, **asked).choices[0].message
[call] = message.tool_calls
given = json.loads(call.function.arguments)
result = count_names(**given)
print(f"count_names(module={given['module']!r}, kind={given['kind']!r}) is {result}")

# The result goes back with the call.
messages += [message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
answer = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
print(answer.choices[0].message.content)
