"""The sandbox in which chat templates run: Jinja's own sandbox, Hugging Face's dialect, resource limits.

Jinja's sandbox keeps a template from Python's internals, but does not limit its resources: consider
`{{ 'x' * 10**10 }}`, nested loops, or a string that doubles itself. Here every step of a template is charged
to a `Budget`. Operations that can make long texts or lists are measured *before* they run; loops and calls
check the time. Templates cannot define operators, and no single operation on values of the permitted size
takes long.

The Rust engine `minijinja` with the Python methods of `minijinja-contrib` (version 3.0.5 of both) is no
replacement. In 1,960 conversations with 70 templates of other vendors, Jinja agrees with transformers in all,
`minijinja` in 1,741; 27 templates differ:

- `None` is iterable (Qwen3-Coder, Nemotron-3-Nano, Hermes, Command R).
- Text marked with `|safe` does not escape the text that is added to it (functionary).
- Floats are written differently, for example `1e-5` for `1e-05` (Gemma 4, GigaChat, Apriel, Seed-OSS).
- `%` formatting, string methods such as `ljust` and filters such as `center` are missing.

Its fuel limits instructions, not memory, and its operators and `set` blocks cannot be intercepted. Of 40
hostile templates in `tests/text/test_chat.py`, 16 end the process with a failed allocation, for example
`x + x` in a loop.

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
"""Maximum length of any text made by a template, including its result."""

MAX_TOTAL_CHARS = 32 * MAX_CHARS
"""Maximum total length of all texts made during one rendering."""

MAX_SECONDS = 10.0
"""Maximum duration of one rendering."""

MAX_BITS = 4096
"""Maximum size of an integer."""


class RenderError(Exception):
    """A template cannot be compiled or has failed. The cause is the error of Jinja or Python."""


class LimitExceededError(Exception):
    """A template exceeds a limit."""


class Budget:
    """The resources used by one rendering."""

    def __init__(self, check_cancelled: Callable[[], None] | None = None) -> None:
        self.check_cancelled = check_cancelled
        self.deadline = time.monotonic() + MAX_SECONDS
        self.chars = 0

    def tick(self) -> None:
        """Check the time, and whether the text is still wanted."""
        if self.check_cancelled is not None:
            self.check_cancelled()
        if time.monotonic() > self.deadline:
            raise LimitExceededError(f"it runs for more than {MAX_SECONDS} seconds")

    def check_length(self, chars: int) -> None:
        """Check the length of one text."""
        self.tick()
        if chars > MAX_CHARS:
            raise LimitExceededError(f"it makes a text of more than {MAX_CHARS} characters")

    def make(self, chars: int) -> None:
        """Charge a text that is about to be made."""
        self.check_length(chars)
        self.spend(chars)

    def spend(self, chars: int) -> None:
        """Charge characters that become part of a text."""
        self.chars += chars
        if self.chars > MAX_TOTAL_CHARS:
            raise LimitExceededError(f"it makes texts of more than {MAX_TOTAL_CHARS} characters in total")


_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("_budget")


def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Syntax errors name the line."""
    import jinja2

    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise RenderError(f"it cannot be compiled: {error}") from error


def render(
    template: jinja2.Template, values: dict[str, Any], check_cancelled: Callable[[], None] | None = None
) -> str:
    """Run a template with a budget of its own."""
    import jinja2

    token = _budget.set(budget := Budget(check_cancelled))
    parts = []
    length = 0
    try:
        for part in template.generate(values):
            length += len(part)
            budget.check_length(length)
            parts.append(part)
    except jinja2.TemplateError as error:
        raise RenderError(error.message or type(error).__name__) from error
    except LimitExceededError as error:
        raise RenderError(str(error)) from error
    except Exception as error:  # any error of an expression in the template
        raise RenderError(f"{type(error).__name__}: {error}") from error
    finally:
        _budget.reset(token)
    return "".join(parts)


def weight(value: object) -> int:
    """Approximate length of a value's text. Counting stops beyond `MAX_CHARS`."""
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
            case int() as number:
                total += 20 + number.bit_length() // 3
            case _:
                total += 20
    return total


def width(value: object) -> int:
    """Maximum characters that an argument adds in one place: an integer's value, a text's length."""
    return abs(int(value)) if isinstance(value, int) else weight(value)


def formatted_chars(text: str, values: Iterable[object]) -> int:
    """Maximum length of a formatted text. Widths are numbers in the format or arguments."""
    values = list(values)
    fields = text.count("%") + text.count("{")
    numbers = [int(number[:10]) for number in re.findall(r"\d+", text)]
    if "*" in text or re.search(r"\{[^{}]*\{", text):
        numbers += [width(value) for value in values]
    return len(text) + fields * (max(numbers, default=0) + weight(values))


def entries(*values: object) -> int:
    """Total length of the values that have one. An entry of a mapping takes the memory of several others."""
    sized = [value for value in values if hasattr(value, "__len__")]
    return sum(len(value) * (16 if isinstance(value, Mapping) else 1) for value in sized)


def made_chars(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Maximum length of the text or list that a filter, or a method of a string, makes of a value."""
    if name in _NO_TEXT:
        return entries(value)
    if (size := weight(value)) > MAX_CHARS:
        return size
    given = (*args, *kwargs.values())
    widest = max(map(width, given), default=0)
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return size + widest
        case "wordwrap":
            return size * (1 + sum(len(item) for item in given if isinstance(item, str)))
        case "expandtabs":
            return size + int(value.count("\t")) * (widest if given else 8)
        case "indent":
            return size + (str(value).count("\n") + 1) * (widest if given else 4)
        case "replace":
            old, new = (*args, *(kwargs.get(key, "") for key in ("old", "new")[len(args) :]))[:2]
            are_texts = isinstance(value, str) and isinstance(old, str)
            return size + int(value.count(old) if are_texts else size) * weight(new)
        case "join":
            return size + entries(value) * widest
        case "format" | "format_map":
            return formatted_chars(str(value), given)
        case "tojson":
            return size * (1 + min(widest, MAX_CHARS))
        case "batch" | "slice":
            return entries(value) + widest
        case "sum":
            # A sum of lists copies the list for each of them.
            return size * entries(value) if any(isinstance(item, (list, tuple)) for item in given) else 0
        case "round" if widest > MAX_BITS:
            raise LimitExceededError(f"it computes with integers of more than {MAX_BITS} bits")
        case "urlize" | "xmlattr" | "pprint":
            return size * (10 + weight(given))
        case "encode" | "to_bytes" | "translate":
            raise LimitExceededError(f"{name}() is not available")
        case _:
            return size


# Filters that make no text. A template may apply them to a whole conversation for every message.
_NO_TEXT = frozenset(
    "abs attr count d default dictsort first float groupby int items last length list map max min random "  # noqa: SIM905
    "reject rejectattr reverse select selectattr sort unique".split()
)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja passes its context as the first argument to filters with this attribute.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        head, value, rest = args[:skip], args[skip], args[skip + 1 :]
        if name in ("join", "sum"):
            value = _sized(value)
        _budget.get().make(made_chars(name, value, rest, kwargs))
        return function(*head, value, *rest, **kwargs)

    return bounded


def _sized(items: Any) -> Any:
    """The items, with a length: those of a generator as a list."""
    return items if hasattr(items, "__len__") else list(items)


def _slice(value: Any, *bounds: int | None) -> Any:
    part = slice(*bounds)
    if hasattr(value, "__len__"):
        _budget.get().make(len(range(*part.indices(len(value)))))
    return value[part]


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
    """`tojson` as Hugging Face defines it: without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # noqa: DTZ005 - local time, as in Hugging Face's


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment shared by all templates."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils, visitor

    class Generation(ext.Extension):
        """`{% generation %}` marks the assistant's text for training. Here it renders its contents."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Callable[[], str]) -> str:
            return caller()

    class Metered(visitor.NodeTransformer):
        """Adds a step to every repeated body, and replaces concatenation and slices by measured filters."""

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

        visit_Macro = visit_CallBlock = visit_Block = visit_For  # noqa: N815

        def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            if not isinstance(node.arg, nodes.Slice):
                return node
            bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
            return nodes.Filter(node.node, "_slice", bounds, [], None, None, lineno=node.lineno)

    class Namespace(utils.Namespace):
        """`namespace()` without names that have a meaning in Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` can be a keyword
            for name in dict(*args[1:], **kwargs):
                _reject_private(name)
            utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _reject_private(name)
            super().__setitem__(name, value)

    def _reject_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        """Jinja's sandbox, in which every operation that can make long texts is measured first."""

        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            tree: nodes.Template = Metered().visit(super()._parse(source, name, filename))
            return tree

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            budget = _budget.get()
            if isinstance(left, int) and isinstance(right, int):
                factor = max(right, 1) if operator == "**" else 1
                bits = max(left.bit_length(), 1) * factor + right.bit_length()
                if operator != "%" and bits > MAX_BITS:
                    raise LimitExceededError(f"it computes with integers of more than {MAX_BITS} bits")
            elif operator == "*":
                times, value = (left, right) if isinstance(left, int) else (right, left)
                if isinstance(times, int) and hasattr(value, "__len__"):
                    budget.make(len(value) * max(times, 0))
            elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                budget.make(len(left) + len(right))
            elif operator == "%" and isinstance(left, str):
                budget.make(formatted_chars(left, right if isinstance(right, tuple) else (right,)))
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            return wrapped and _bounded_method(value.__self__, value.__name__, wrapped)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            if isinstance(owner, str) and name == "join" and args:
                args = (_sized(args[0]), *args[1:])
                chars = made_chars(name, args[0], (owner,), {})
            elif isinstance(owner, (str, int)):
                chars = made_chars(name, owner, args, kwargs)
            else:
                # The arguments may be copied, for example by `dict`.
                chars = entries(owner if name == "copy" else (), *args, *kwargs.values())
            _budget.get().make(chars)
            return super().call(context, function, *args, **kwargs)

    def _bounded_method(text: str, name: str, method: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(method)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _budget.get().make(made_chars(name, text, args, kwargs))
            return method(*args, **kwargs)

        return bounded

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
    } | {"_concatenate": _concatenate, "_loop_step": _loop_step, "_slice": _slice}
    return environment
