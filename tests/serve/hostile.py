"""Requests that take minutes, gigabytes or the process where nothing bounds them, and relatives of theirs."""

import json

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "a"}
MANY = 30_000

REGEX = [
    *("{" + " " * 500 + "x", "{" + " " * 5000 + "x", "{" * MANY, "{ " * MANY, "{1," * 20_000, "{,}" * 20_000),
    *("(a{1,1000}){1,1000}", "((a{1,100}){1,100}){1,100}", "(x+x+)+y", "(a?){5000}a{5000}", "a{1,1000000}"),
    *("[a-z]{1,1000000}b", ".*a.{200}", ".*(a|b).{1000}", "(" * MANY + ")" * MANY, "(a|" * 15_000),
    "|".join(f"w{number}" for number in range(8000)),
    "|".join(f"w{number}.*z" for number in range(6000)),
    f"(?:{'|'.join(f'.*w{number}' for number in range(5000))})*",
    *(r"\p{L}{1,1000}\p{N}*" * 50, r"(\p{L}*\p{N}*)*" * 500, "[^a]" * 15_000, "(?i)" + "ß" * MANY),
    *("a?" * MANY, "(a?b?c?)*" * 5000, ".*" * MANY, ".*a" * 20_000, "a{99999999999999999999}", "\\" * MANY),
]
GRAMMARS = [
    *("\n" * 60_000, " " * 60_000 + "x", "#" * 60_000, "#\n" * MANY, "::=" * 20_000, "a::=" * 15_000),
    *("root ::= " + "(" * 20_000, 'root ::= "a"' + "*" * 50_000, 'root ::= "a"' + "{1}" * 15_000),
    'root ::= "a"\n' + "".join(f"a{number} ::= a{number + 1}\n" for number in range(4000)) + 'a4000 ::= "a"',
    'root ::= "a"{' + "9" * 5000 + "}",
    "start: " + "|".join(f'"w{number}"' for number in range(5000)),
    'start: start start start start | "a" | ',
    *('start: (x{1,1000}){1,1000}\nx: "a"', 'start: x~1000000000\nx: "a"', "start: " + "(" * 10_000),
    "start: A\nA: " + " ".join(["/.*a/"] * 3000),
    "start: a0\n" + "".join(f"a{number}: a{number + 1}\n" for number in range(4000)) + 'a4000: "x"',
    "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(40)) + 'a40: "x"',
    "start: " + "(a|b)? " * 5000 + '\na: "a"\nb: "b"',
    "start: " + "a " * 20_000 + '\na: "a"?',
    "start: " + "|".join(f"/.*{number}.*/" for number in range(3000)),
    'start: %json {"type": "integer", "multipleOf": 999983}',
    *("start: start", "start: ", "%llguidance {" + "[" * 50_000, "start: /" + "a?" * 20_000 + "/"),
]
SCHEMAS = [
    *({"type": "integer", "multipleOf": 999983}, {"type": "integer", "multipleOf": 4294967291}),
    *(
        {"type": "number", "multipleOf": 1e-300, "maximum": 1e300},
        {"type": "string", "pattern": "a?" * 20_000},
    ),
    {"type": "array", "items": {"type": "integer"}, "minItems": 900_000, "maxItems": 900_000},
    {"type": "string", "minLength": 900_000, "maxLength": 999_999},
    {"enum": [f"v{number}" for number in range(6000)]},
    {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2000)}},
    {"anyOf": [{"type": "object", "properties": {f"p{number}": {}}} for number in range(1000)]},
    {"allOf": [{"anyOf": [{"properties": {f"{c}{n}": {}}} for c in "ab"]} for n in range(20)]},
    {"allOf": [{"anyOf": [{"type": "string", "pattern": f"{c}{n}"} for c in "ab"]} for n in range(14)]},
    {"type": "string", "allOf": [{"pattern": f".*a.{{{number}}}"} for number in range(50)]},
    {
        "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(30)} | {"a30": {}},
        "$ref": "#/$defs/a0",
    },
    {
        "$defs": {f"a{n}": {"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)} | {"a40": {}},
        "$ref": "#/$defs/a0",
    },
    *({"$ref": "#"}, {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}, {"type": "integer", "minimum": -(10**300)}),
    {"type": "object", "patternProperties": {f"a{number}.*b": {} for number in range(300)}},
    {"type": "array", "prefixItems": [{"type": "integer"}] * 2500},
    {"const": "a" * 60_000},
]
CHOICES = [
    [f"w{number}" for number in range(7000)],
    *(["a" * number for number in range(1, 340)], ["a" * 60_000], ["a"] * 12_000, ["é🙂"] * 3000),
]


def _nested(depth):
    return json.loads('{"a":' * depth + "1" + "}" * depth)


def _tools(schema):
    return [{"type": "function", "function": {"name": "look", "parameters": schema}}]


BODIES = [
    *({"stop": ["a" * 1024] * 64}, {"stop": [" " * 1024] * 64}, {"stop": ["a"] * 100_000}),
    *({"logit_bias": {str(number): 1 for number in range(100_000)}}, {"logit_bias": {"9" * 100_000: 1}}),
    *({"stop_token_ids": [1] * 300_000}, {"allowed_token_ids": list(range(300_000))}),
    *({"bad_words": ["a b c"] * 5000}, {"seed": 10**4000}, {"max_tokens": 10**400}, {"n": 10**400}),
    *({"temperature": 10**4000}, {"user": "a" * 2**21}, {f"x{number}": 1 for number in range(50_000)}),
    *(
        {"metadata": _nested(90)},
        {"metadata": _nested(900)},
        {"cache_salt": "a" * 2**20},
        {"model": "a" * 2**20},
    ),
]
CHATS = [
    *({"messages": [USER] * 20_000}, {"messages": [USER | {"content": "a " * 2**19}]}),
    *({"messages": [USER | {"content": [{"type": "text", "text": "a"}] * 20_000}]},),
    *({"chat_template_kwargs": {"a": 10**4000}}, {"chat_template_kwargs": _nested(90)}),
    *({"chat_template_kwargs": {f"x{number}": 1 for number in range(20_000)}},),
    *({"tools": _tools(schema), "tool_choice": "required"} for schema in SCHEMAS[:4]),
    {"tools": _tools({"type": "object"}) * 5000, "tool_choice": "required"},
    {"messages": [USER | {"content": "<tool_call>" * 20_000}]},
]
#: Not what `json` would write.
RAW = [
    *(b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "temperature": 1e999}'),
    *(b'{"prompt": "a", "temperature": 0.' + b"9" * 2**20 + b"}", b"[" * 2**20, b'{"a":' * 2**18),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b" " * 2**21, b'"' + b"\\" * 2**20),
    b'{"prompt": [' + b",".join([b"9" * 4300] * 200) + b"]}",
]


def _completion(**given):
    return COMPLETION, json.dumps({"prompt": "a", "max_tokens": 2, **given}).encode()


def _form(kind, form):
    return _completion(structured_outputs={kind: form})


#: Paths and bodies, at least 100.
HOSTILE = [
    *(_form("regex", form) for form in REGEX),
    *(_form("grammar", form) for form in GRAMMARS),
    *(_form("json", form) for form in SCHEMAS),
    *(_form("choice", form) for form in CHOICES),
    *(_completion(**body) for body in BODIES),
    *((CHAT, json.dumps({"messages": [USER], "max_tokens": 2, **body}).encode()) for body in CHATS),
    *((COMPLETION, body) for body in RAW),
]
assert len(HOSTILE) >= 100
