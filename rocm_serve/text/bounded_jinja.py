"""A Jinja environment in which a template can neither run nor grow without end.

The work of a template is counted in units, not in seconds: a pass through a loop, a call or a filter costs _STEP, a
character that it makes or looks through costs 1, an element of a list _ELEMENT. An operation that can make a large
value pays before it begins, so that the memory is bounded as well. A few of Jinja's tools whose cost cannot be foreseen
are left out; no chat template is known to use them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Sequence as Many
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_STEP, _ELEMENT = 100, 20
_LEFT_OUT_FILTERS = ("wordwrap", "xmlattr", "urlize", "pprint")
_LEFT_OUT_GLOBALS = ("lipsum",)
_LEFT_OUT_METHODS = {"translate", "expandtabs", "format_map", "encode", "to_bytes"}
# These filters look at their first argument as a whole only if it is a text.
_SHALLOW_FILTERS = {
    *("attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random"),
    *("reject", "rejectattr", "reverse", "select", "selectattr", "slice"),
}
# Names that no template can write, for the filters put into it.
_COUNT, _JOIN, _WEIGH, _MADE = " count", " join", " weigh", " made"


_TOO_MUCH = "it does more than a conversation needs: it loops without end, or doubles a text"


class OutOfWork(jinja2.TemplateError):
    """A template has used up its units of work."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for one template.

    work: units that compiling and rendering may take together
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, work: int, **options: Any) -> None:
        # Constants are not folded when the template is compiled: folded work would not be counted at each use.
        super().__init__(finalize=self._printed, optimized=False, **options)
        self._left = work
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        for name in _LEFT_OUT_GLOBALS:
            del self.globals[name]
        self.filters = {name: self._charged(name, tool) for name, tool in self.filters.items()}
        self.tests = {name: self._charged(name, tool) for name, tool in self.tests.items()}
        self.filters |= {_COUNT: self._spend, _JOIN: self._join, _WEIGH: self._weigh, _MADE: self._made}

    def charge(self, name: str, tool: Callable[..., Any]) -> None:
        """Registers a function as a filter that pays for its work. It replaces another filter of that name."""
        self.filters[name] = self._charged(name, tool)

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        counted = _Counting().visit(source)
        counted.set_environment(self)
        return super()._generate(counted, name, filename, defer_init)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Like the sandbox's, but refuses methods whose cost cannot be foreseen."""
        return attr not in _LEFT_OUT_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Applies an operator whose result may be large. Raises OutOfWork."""
        if operator == "%" and isinstance(left, str):
            self._spend(self._cost_of_format(left, (right,)))
        elif isinstance(left, int) and isinstance(right, int):
            self._spend(left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length())
        elif operator == "*":
            times = left if isinstance(left, int) else right
            self._spend(_length(right if isinstance(left, int) else left) * (times if isinstance(times, int) else 1))
        else:
            self._spend(_length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method. Raises OutOfWork."""
        method = getattr(obj, "__wrapped__", obj)
        owner, given = getattr(method, "__self__", None), (*args, *kwargs.values())
        self._spend(_STEP + _length(owner) + sum(map(_length, given)))
        if isinstance(owner, str):
            self._spend(self._cost_of_text(method.__name__, owner, given))
        result = super().call(context, obj, *args, **kwargs)
        self._spend(_length(result))
        return result

    def _charged(self, name: str, tool: Any) -> Callable[..., Any]:
        """Wraps a filter or a test so that it pays for its work."""
        skipped = int(hasattr(tool, "jinja_pass_arg"))  # the context or environment that Jinja hands in
        measure = self._made if name in _SHALLOW_FILTERS else self._weigh

        @functools.wraps(tool)
        def charged(*args: Any, **kwargs: Any) -> Any:
            self._spend(_STEP)
            passed, given = args[:skipped], [_listed(value) for value in args[skipped:]]
            for value in given:
                measure(value)
            if given:
                self._spend(self._cost_of_text(name, given[0], (*given[1:], *kwargs.values())))
            result = tool(*passed, *given, **kwargs)
            self._made(result)
            return result

        return charged

    def _cost_of_text(self, name: str, text: Any, given: Many[Any]) -> int:
        """Units that a method or filter makes beyond the size of its input; given: its arguments after the text."""
        numbers = sum(abs(value) for value in given if isinstance(value, int))
        if name == "replace" and len(given) >= 2:
            old, new = str(given[0]), str(given[1])
            return str(text).count(old) * len(new)
        if name == "join":  # of the filter's two arguments one is the separator; the method's text is one
            return _length(text) * sum(map(_length, given)) + sum(map(self._unfolded, given))
        if name == "format":
            return self._cost_of_format(str(text), given)
        if name in ("indent", "tojson"):
            width = numbers + sum(len(value) for value in given if isinstance(value, str))
            return width * self._unfolded(text)
        if name in ("center", "ljust", "rjust", "zfill", "truncate", "batch", "slice", "round"):
            return numbers
        return 0

    def _cost_of_format(self, text: str, given: Many[Any]) -> int:
        fields = 1 + text.count("%") + text.count("{")
        # A width of more digits than these is beyond any budget.
        widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", text))
        if "*" in text or re.search(r"\{[^{}]*\{", text):  # a width that is an argument
            arguments = [*given, *(value for group in given if isinstance(group, tuple) for value in group)]
            widths += sum(abs(value) for value in arguments if isinstance(value, int))
        return len(text) + widths + fields * sum(map(self._unfolded, given))

    def _unfolded(self, value: Any) -> int:
        """Units of a value when it is written out: an element contained twice counts twice. Raises OutOfWork."""
        units, to_count = 0, [value]
        while to_count:
            value = to_count.pop()
            units += _ELEMENT + _length(value)
            if units > self._left:
                raise OutOfWork(_TOO_MUCH)
            if isinstance(value, Mapping):
                to_count += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
                to_count += value
            elif isinstance(value, Namespace):
                to_count.append(object.__getattribute__(value, "_Namespace__attrs"))
        return units

    def _weigh(self, value: Any) -> Any:
        self._spend(self._unfolded(value))
        return value

    @jinja2.pass_context  # which keeps Jinja from calling it while the template is compiled
    def _printed(self, context: Context, value: Any) -> Any:
        return self._weigh(value)

    def _made(self, value: Any) -> Any:
        self._spend(_length(value))
        return value

    def _join(self, values: list[Any]) -> str:
        """The value of a ~ b ~ c."""
        return "".join(str(self._weigh(value)) for value in values)

    def _spend(self, units: int) -> str:
        self._left -= units
        if self._left < 0:
            raise OutOfWork(_TOO_MUCH)
        return ""


class _Counting(NodeTransformer):
    """Adds filters that count a template's work in places where the sandbox has no hook."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            # The test runs for every element, including those that the body does not see.
            node.test = nodes.And(nodes.Not(_filtered(nodes.Const(_STEP), _COUNT)), node.test)
        return _counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return _counted(self.generic_visit(node))

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return _counted(self.generic_visit(node))

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return _counted(self.generic_visit(node))

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _JOIN)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, _WEIGH)
        for operand in node.ops:
            operand.expr = _filtered(operand.expr, _WEIGH)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node


def _counted(node: Any) -> nodes.Node:
    """Makes the body of a node begin with paying for its own length. Returns the node."""
    parts = [part for child in node.body for part in (child, *child.find_all(nodes.Node))]
    units = _STEP + len(parts) + sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))
    node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(units), _COUNT)))
    return cast(nodes.Node, node)


def _filtered(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _length(value: Any) -> int:
    """Characters of a text, elements of a collection, 1 of anything else."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    return len(value) if isinstance(value, str | bytes | list | tuple | set | frozenset | dict | range) else 1
