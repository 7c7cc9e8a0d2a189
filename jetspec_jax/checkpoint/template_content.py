"""What a chat template reads, told from its source: its variables, and contents as lists of parts."""

import functools
from collections.abc import Iterator

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser

# Filters that give a part, or something of each part.
_OF_PARTS = frozenset(("map", "selectattr", "rejectattr", "select", "reject", "first", "last"))


class _Generation(jinja2.ext.Extension):
    """The ``generation`` block of transformers' templates, read as the statements in it."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _parsed(template: str) -> nodes.Template:
    """The syntax tree of a template with the blocks of transformers' templates."""
    return jinja2.Environment(extensions=[jinja2.ext.loopcontrols, _Generation]).parse(template)


@functools.lru_cache(maxsize=32)
def variables_of(template: str) -> frozenset[str]:
    """Names of the variables that a template reads and does not set itself.

    Raises:
        jinja2.TemplateSyntaxError: It is no template.
    """
    return frozenset(meta.find_undeclared_variables(_parsed(template)))


@functools.lru_cache(maxsize=32)
def walks_parts(template: str) -> bool:
    """Whether a template loops over the parts of a message's content.

    The loop may be over a name that is set to the content, or over a macro's parameter. Scopes of names are
    ignored.

    Raises:
        jinja2.TemplateSyntaxError: It is no template.
    """
    tree = _parsed(template)
    macros = {macro.name: [own.name for own in macro.args] for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    found = set(_names(tree, macros, names))
    while not found <= names:
        names |= found
        found = set(_names(tree, macros, names))
    loops = (loop.iter for loop in tree.find_all(nodes.For))
    filtered = (own.node for own in tree.find_all(nodes.Filter) if own.name in _OF_PARTS and own.node)
    texts = (own.node for own in tree.find_all((nodes.Getattr, nodes.Getitem)) if _key(own) == "text")
    indexed = (own.node for own in texts if isinstance(own, nodes.Getitem))
    return any(_is_content(own, names) for own in (*loops, *filtered, *indexed))


def _names(tree: nodes.Template, macros: dict[str, list[str]], names: set[str]) -> Iterator[str]:
    """Names that hold a content, where those in ``names`` do."""
    for own in tree.find_all(nodes.Assign):
        if isinstance(own.target, nodes.Name) and _is_content(own.node, names):
            yield own.target.name
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and (parameters := macros.get(call.node.name)):
            given = [
                *zip(parameters, call.args, strict=False),
                *((own.key, own.value) for own in call.kwargs),
            ]
            yield from (name for name, value in given if _is_content(value, names))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, also filtered, sliced, or as one of two choices."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return any(own is not None and _is_content(own, names) for own in (node.expr1, node.expr2))
    if isinstance(node, nodes.Or | nodes.And):
        return _is_content(node.left, names) or _is_content(node.right, names)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, names)
    return _key(node) == "content"


def _key(node: nodes.Node) -> str | None:
    """The key that an access such as ``message.content`` or ``message['content']`` names."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    return None
