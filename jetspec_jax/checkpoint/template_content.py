"""Static analysis of a chat template: the variables it reads, and whether it loops over content parts."""

import functools
from collections.abc import Iterator

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser

from jetspec_jax.config.fields import TEMPLATE, check_values

# Filters whose input is a list of parts.
_OF_PARTS = frozenset(("map", "selectattr", "rejectattr", "select", "reject", "first", "last"))


class _Generation(jinja2.ext.Extension):
    """Parses the ``generation`` block of transformers' templates as the statements in it."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateTooDeep(ValueError):
    """A template is nested too deeply, or is too large, for Jinja or Python to compile it."""


@functools.lru_cache(maxsize=32)
def _parsed(template: str) -> nodes.Template:
    """The syntax tree of a template, with the extensions of transformers."""
    content = template.encode(errors="surrogatepass")
    try:
        check_values([content], len(content), TEMPLATE, "it")
    except ValueError as error:
        raise TemplateTooDeep(str(error)) from error
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols, _Generation])
    try:
        tree = environment.parse(template)
        environment.compile(template)
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise TemplateTooDeep(f"it is nested too deeply: {type(error).__name__}: {error}") from error
    return tree


@functools.lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """Names of the variables that a template reads and does not set itself."""
    return frozenset(meta.find_undeclared_variables(_parsed(template)))


@functools.lru_cache(maxsize=32)
def walks_parts(template: str) -> bool:
    """Whether a template loops over the parts of a message's content.

    The loop may be over a variable that is set to the content, or over a macro's parameter. Scopes of
    variables are ignored.
    """
    tree = _parsed(template)
    macros = {macro.name: [arg.name for arg in macro.args] for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    found = set(_names(tree, macros, names))
    while not found <= names:
        names |= found
        found = set(_names(tree, macros, names))
    loops = (loop.iter for loop in tree.find_all(nodes.For))
    filtered = (node.node for node in tree.find_all(nodes.Filter) if node.name in _OF_PARTS and node.node)
    texts = (node.node for node in tree.find_all((nodes.Getattr, nodes.Getitem)) if _key(node) == "text")
    indexed = (node.node for node in texts if isinstance(node, nodes.Getitem))
    return any(_is_content(node, names) for node in (*loops, *filtered, *indexed))


def _names(tree: nodes.Template, macros: dict[str, list[str]], names: set[str]) -> Iterator[str]:
    """Variables that hold a content, given that those in ``names`` do."""
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, names):
            yield assignment.target.name
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (parameters := macros.get(call.node.name)):
            arguments = [
                *zip(parameters, call.args, strict=False),
                *((keyword.key, keyword.value) for keyword in call.kwargs),
            ]
            yield from (name for name, value in arguments if _is_content(value, names))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, possibly filtered, sliced, or in a conditional."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return any(branch is not None and _is_content(branch, names) for branch in (node.expr1, node.expr2))
    if isinstance(node, nodes.Or | nodes.And):
        return _is_content(node.left, names) or _is_content(node.right, names)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, names)
    return _key(node) == "content"


def _key(node: nodes.Node) -> str | None:
    """The key of an access such as ``message.content`` or ``message['content']``."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    return None
