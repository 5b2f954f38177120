"""Chat templates are programs of strangers: run in a sandbox that gives them nothing to change and little to fill.

Jinja's own sandbox keeps a template from the machine. It does not keep one from memory: ``"a" * 10**10`` is a legal
expression. Here no operator and no method makes a string, a list or a number beyond :data:`MAX_SIZE`, and rendering
stops when the text exceeds what such a template could mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SIZE = 4 * 1024 * 1024
"""Characters of a string, or items of a list, that a template may make; also of the whole prompt."""

_MAX_BITS = 256
"""Of an integer that a template may make."""

_GROWING = ("center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate", "encode")
"""Methods of strings whose result has the size that an argument says."""

_GROWING_FILTERS = ("center", "format", "indent", "wordwrap", "xmlattr", "urlize", "pprint")
"""Filters of the same kind."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which ``transformers`` 4.57 renders chat templates, with bounds on what they make."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        for name in _GROWING_FILTERS:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters["replace"] = _replace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Concatenations().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator, unless its result would be huge."""
        _check_size(f"the operator {operator}", _result_size(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse methods of strings that make longer ones, beside what Jinja's sandbox refuses."""
        if isinstance(obj, str) and attr in _GROWING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Leave ``format`` to :meth:`is_safe_attribute`, which refuses it."""

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something of a template; what a string is to be replaced by must not multiply it."""
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            return _replace(owner, *args)
        if isinstance(owner, str) and name == "join":
            parts = [str(part) for part in args[0]]
            _check_size("join", len(owner) * len(parts) + sum(map(len, parts)))
        return super().call(context, obj, *args, **kwargs)


class _Concatenations(NodeTransformer):
    """Turns ``a ~ b``, which is no operator to Jinja, into additions of strings, which is one."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802  the name is Jinja's
        self.generic_visit(node)
        parts = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        whole: nodes.Expr = parts[0]
        for part in parts[1:]:
            whole = nodes.Add(whole, part, lineno=node.lineno)
        return whole


def render(render_parts: Callable[[], Any]) -> str:
    """Join the parts of a template as they come, and stop one that does not end."""
    parts, size = [], 0
    for part in render_parts():
        parts.append(part)
        size += len(part)
        if size > MAX_SIZE:
            raise TemplateError(f"the prompt is longer than {MAX_SIZE} characters")
    return "".join(parts)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Return the size that a result would have, in items; of a number, how often it exceeds what is allowed."""
    if operator == "%" and isinstance(left, str):
        widths = re.findall(r"\d+", left)
        return MAX_SIZE + 1 if "*" in left or any(len(width) > 4 for width in widths) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
        return MAX_SIZE + 1 if operator in ("*", "**") and bits > _MAX_BITS else 0
    sizes = [len(value) for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
    if operator == "+":
        return sum(sizes)
    counts = [value for value in (left, right) if isinstance(value, int)]
    return sizes[0] * max(counts[0], 0) if operator == "*" and sizes and counts else 0


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    whole, old, new = str(text), str(old), str(new)
    found = whole.count(old) if count < 0 else min(whole.count(old), count)
    _check_size("replace", len(whole) + found * len(new))
    return whole.replace(old, new, count)


def _check_size(what: str, size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateError(f"{what} would make something of more than {MAX_SIZE} characters or items")


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    # Jinja's own filter escapes HTML.
    indent = layout.get("indent")
    if (isinstance(indent, int) and indent > 16) or (isinstance(indent, str) and len(indent) > 16):
        raise TemplateError(f"tojson with an indent of {indent!r:.40}: at most 16 are allowed")
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
