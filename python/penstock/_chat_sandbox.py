"""Where chat templates run: Jinja's sandbox with Hugging Face's dialect and with limits.

Jinja's sandbox keeps a template from Python's internals, but not from using up the machine:
`{{ 'x' * 10**10 }}`, a loop in a loop, a string that doubles itself. Here every step of a template is
counted against a `Budget`. Whatever can make much out of little is measured *before* it happens; loops and
calls look at the clock. A template has no other way to spend time or memory: it cannot define operators, and
no single operation on values of the permitted size takes long.

jinja2 is imported inside functions, so that importing penstock does not import it.
"""

from __future__ import annotations

import contextvars
import functools
import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import jinja2

MAX_CHARS = 8 << 20
"""Most characters of any text that a template makes, its result included."""

MAX_TOTAL_CHARS = 32 * MAX_CHARS
"""Most characters of all texts together that one rendering makes on its way."""

MAX_SECONDS = 10.0
"""Longest time of one rendering."""

MAX_BITS = 4096
"""Most bits of an integer."""


class TemplateFailure(Exception):  # noqa: N818 - what happened, told to the caller in the caller's words
    """The template cannot be compiled, or gave up; the cause is Jinja's or Python's error."""


class LimitExceeded(Exception):  # noqa: N818
    """A template went over a limit."""


class Budget:
    """What one rendering has used."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.chars = 0

    def tick(self) -> None:
        """Count a step."""
        if time.monotonic() > self.deadline:
            raise LimitExceeded(f"it runs for more than {MAX_SECONDS} seconds")

    def check_length(self, chars: int) -> None:
        """Count a step of a text that has grown to so many characters."""
        self.tick()
        if chars > MAX_CHARS:
            raise LimitExceeded(f"it makes a text of more than {MAX_CHARS} characters")

    def make(self, chars: int) -> None:
        """Count a text that is about to be made."""
        self.check_length(chars)
        self.spend(chars)

    def spend(self, chars: int) -> None:
        """Count characters that become part of some text."""
        self.chars += chars
        if self.chars > MAX_TOTAL_CHARS:
            raise LimitExceeded(f"it makes texts of more than {MAX_TOTAL_CHARS} characters together")


_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("_budget")


def compile_template(source: str) -> jinja2.Template:
    """Compile a template; its syntax errors name the line."""
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFailure(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise TemplateFailure(f"it cannot be compiled: {error}") from error


def render(template: jinja2.Template, values: dict[str, Any]) -> str:
    """Run a template within its budget."""
    import jinja2

    token = _budget.set(budget := Budget())
    parts = []
    length = 0
    try:
        for part in template.generate(values):
            length += len(part)
            budget.check_length(length)
            parts.append(part)
    except jinja2.TemplateError as error:
        raise TemplateFailure(error.message or type(error).__name__) from error
    except LimitExceeded as error:
        raise TemplateFailure(str(error)) from error
    except Exception as error:  # whatever an expression of the template raises
        raise TemplateFailure(f"{type(error).__name__}: {error}") from error
    finally:
        _budget.reset(token)
    return "".join(parts)


def weight(value: object) -> int:
    """About how many characters a value has when written; it stops counting beyond `MAX_CHARS`."""
    total = 0
    stack: list[Any] = [value]
    while stack and total <= MAX_CHARS:
        match stack.pop():
            case str() as text:
                total += len(text) + 2
            case Mapping() as mapping:
                total += 2 * len(mapping) + 2
                stack.extend(mapping.keys())
                stack.extend(mapping.values())
            case list() | tuple() | set() | frozenset() as items:
                total += 2 * len(items) + 2
                stack.extend(items)
            case _:
                total += 20
    return total


def width(value: object) -> int:
    """How far an argument can widen a text: an integer by its value, a text by its length."""
    return abs(value) if isinstance(value, int) else len(value) if isinstance(value, str) else 0


def formatted_chars(text: str, values: Iterable[object]) -> int:
    """The most characters that formatting can make: widths are numbers in the text, or arguments."""
    values = list(values)
    fields = text.count("%") + text.count("{")
    numbers = [int(number[:10]) for number in re.findall(r"\d+", text)]
    if "*" in text or re.search(r"\{[^{}]*\{", text):
        numbers += [width(value) for value in values]
    return len(text) + fields * (max(numbers, default=0) + weight(values))


def method_chars(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many characters a method of a string can make, at most."""
    given = (*args, *kwargs.values())
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return len(text) + max(map(width, given), default=0)
        case "expandtabs":
            return len(text) + text.count("\t") * max(map(width, given), default=8)
        case "replace" if len(args) > 1 and isinstance(args[0], str):
            return len(text) + text.count(args[0]) * width(args[1])
        case "join" if args and isinstance(args[0], (list, tuple)):
            return weight(args[0]) + len(args[0]) * len(text)
        case "format" | "format_map":
            return formatted_chars(text, given)
        case "translate":
            raise LimitExceeded("translate() is not available")
        case _:
            return len(text)


def filter_chars(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many characters a filter can make, at most; `args` begin with the value it is applied to."""
    value, *rest = args
    given = (*rest, *kwargs.values())
    match name:
        case "center" | "wordwrap":
            return (
                weight(value)
                + weight(value) * sum(len(item) for item in given if isinstance(item, str))
                + (max((abs(item) for item in given if isinstance(item, int)), default=0))
            )
        case "indent":
            return weight(value) + (str(value).count("\n") + 1) * max(map(width, given), default=4)
        case "replace":
            old = str(given[0]) if given else ""
            new = max(map(width, given[1:]), default=0)
            return weight(value) + (str(value).count(old) * new if isinstance(value, str) else 0)
        case "join":
            return weight(value) + (len(value) if hasattr(value, "__len__") else 1) * max(
                map(width, given), default=0
            )
        case "format":
            return formatted_chars(str(value), given)
        case "tojson":
            indent = max((abs(item) for item in given if isinstance(item, int)), default=0)
            return weight(value) * (1 + min(indent, MAX_CHARS))
        case "batch" | "slice":
            return max((abs(item) for item in given if isinstance(item, int)), default=0)
        case "urlize" | "xmlattr":
            return weight(value) * (10 + weight(given))
        case _:
            return weight(value)


# Filters that make no text and may be used on a whole conversation for every message of it.
_NO_TEXT = frozenset(
    {
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "groupby",
        "int",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "select",
        "selectattr",
        "sort",
        "sum",
        "unique",
    }
)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja hands some filters its context first, and says so on the function.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        if name in _NO_TEXT:
            budget.tick()
        else:
            budget.make(filter_chars(name, args[skip:], kwargs))
        return function(*args, **kwargs)

    return bounded


def _concatenate(parts: list[Any]) -> str:
    _budget.get().make(sum(map(weight, parts)))
    return "".join(map(str, parts))


def _loop_step(static_chars: int) -> None:
    budget = _budget.get()
    budget.tick()
    budget.spend(static_chars)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position, too
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """`tojson` as the templates of Hugging Face expect it: no HTML escapes, and the text as it is."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # noqa: DTZ005 - the user's own time, as Hugging Face gives it


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@functools.cache
def _environment() -> jinja2.Environment:
    """The one environment of all templates."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils, visitor

    class Generation(ext.Extension):
        """`{% generation %}` marks what the assistant wrote, for training; here it is what stands inside."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's way

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Callable[[], str]) -> str:
            return caller()

    class Metered(visitor.NodeTransformer):
        """Puts a step into every loop, and concatenation where it can be measured."""

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            parts = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
            return nodes.Filter(parts, "_concatenate", [], [], None, None, lineno=node.lineno)

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            static = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            self.generic_visit(node)
            count = nodes.Const(static, lineno=node.lineno)
            step = nodes.Filter(count, "_loop_step", [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
            return node

    class Namespace(utils.Namespace):
        """`namespace()` without names that Python gives a meaning of its own."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` can be a keyword
            for name in dict(*args[1:], **kwargs):
                _refuse_private(name)
            utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        """The sandbox, with every operation that can grow measured beforehand."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Metered().visit(super()._parse(source, name, filename))
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            budget = _budget.get()
            if isinstance(left, int) and isinstance(right, int):
                bits = (
                    max(left.bit_length(), 1) * (max(right, 1) if operator == "**" else 1)
                    + right.bit_length()
                )
                if operator != "%" and bits > MAX_BITS:
                    raise LimitExceeded(f"it computes with integers of more than {MAX_BITS} bits")
            elif operator == "*":
                times = left if isinstance(left, int) else right
                value = right if isinstance(left, int) else left
                if isinstance(times, int) and hasattr(value, "__len__"):
                    budget.make(len(value) * max(times, 0))
            elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                budget.make(len(left) + len(right))
            elif operator == "%" and isinstance(left, str):
                budget.make(formatted_chars(left, right if isinstance(right, tuple) else (right,)))
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            @functools.wraps(wrapped)
            def bounded(*args: Any, **kwargs: Any) -> str:
                _budget.get().make(method_chars(value.__self__, value.__name__, args, kwargs))
                return wrapped(*args, **kwargs)

            return bounded

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            budget = _budget.get()
            owner = getattr(function, "__self__", None)
            if isinstance(owner, str):
                budget.make(method_chars(owner, function.__name__, args, kwargs))
            else:
                budget.tick()
            return super().call(context, function, *args, **kwargs)

    def finalize(value: Any) -> Any:
        _budget.get().make(weight(value))
        return value

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        finalize=finalize,
        extensions=[Generation, ext.loopcontrols],
        cache_size=0,
    )
    del environment.globals["lipsum"]
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": Namespace,
    }
    environment.filters["tojson"] = _to_json
    environment.filters = {
        name: _bounded_filter(name, function) for name, function in environment.filters.items()
    } | {"_concatenate": _concatenate, "_loop_step": _loop_step}
    return environment
