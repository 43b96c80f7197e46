"""The sandbox in which chat templates run: Jinja's own sandbox, Hugging Face's dialect, resource limits.

Jinja's sandbox keeps a template from Python's internals, but does not limit its resources: consider
`{{ 'x' * 10**10 }}`, nested loops, or a string that doubles itself. Here every step of a template is charged
to a `Budget`. Operations that can make long texts or lists, or that read whole values (comparison,
membership, sorting, hashing), are measured *before* they run; loops, calls and the items of filters such as
`map` check the time. A value that contains others several times counts each of them as often as it is read.
Templates cannot define operators, so no single operation takes long. The size of a template limits the time
to compile it.

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

Jinja and the compiler of Python recurse as deep as a template is nested, and a macro may call itself, so
templates are compiled in `call_deep`, and those with macros run in it.

jinja2 is imported inside functions, so that importing penstock does not import it.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import json
import math
import operator
import re
import time
import types
import weakref
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock import _core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import jinja2

MAX_CHARS = 8 << 20
"""Maximum length of any text made by a template, including its result."""

MAX_TOTAL_CHARS = 32 * MAX_CHARS
"""Maximum total length of all texts made during one rendering."""

MAX_SECONDS = 10.0
"""Maximum duration of one rendering."""

MAX_BITS = 4096
"""Maximum size of an integer."""

MAX_SOURCE_CHARS = 256 << 10
"""Maximum length of a template."""

MAX_NODES = 10_000
"""Maximum number of nodes of a parsed template. Published templates have at most a third."""

MAX_READ_CHARS = 32 * MAX_CHARS
"""Maximum total length of the values that are compared, sorted or searched during one rendering."""

MAX_LAYOUT_CHARS = 1000
"""Maximum length of a layout of `strftime_now`."""

ENTRY_CHARS = 4
"""Memory of an entry of a list, in characters."""

OBJECT_CHARS = 32
"""Memory of a new object in a list, in characters."""


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
        self.chars_read = 0

    def end(self) -> None:
        """End the rendering at its next step."""
        self.deadline = -math.inf

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
        self.tick()
        if chars > MAX_CHARS:
            self.check_length(chars)
        self.chars += chars
        if self.chars > MAX_TOTAL_CHARS:
            self.spend(0)

    def spend(self, chars: int) -> None:
        """Charge characters that become part of a text."""
        self.chars += chars
        if self.chars > MAX_TOTAL_CHARS:
            raise LimitExceededError(f"it makes texts of more than {MAX_TOTAL_CHARS} characters in total")

    def read(self, chars: int) -> None:
        """Charge characters that are about to be read, each as often as it is."""
        self.tick()
        self.chars_read += chars
        if self.chars_read > MAX_READ_CHARS:
            raise LimitExceededError(f"it compares or searches more than {MAX_READ_CHARS} characters")


_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("_budget")

#: Templates that may recurse when they run: the others have neither macros nor recursive loops.
_recursive: weakref.WeakSet[jinja2.Template] = weakref.WeakSet()


def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Syntax errors name the line."""
    template = _core.call_deep(partial(_compile, source), lambda: None)
    if "macro" in source or "recursive" in source:
        _recursive.add(template)
    return template


def _compile(source: str) -> jinja2.Template:
    import jinja2

    if len(source) > MAX_SOURCE_CHARS:
        raise RenderError(f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
    try:
        return _environment().from_string(source)
    except LimitExceededError as error:
        raise RenderError(str(error)) from error
    except jinja2.TemplateSyntaxError as error:
        raise RenderError(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise RenderError(f"it cannot be compiled: {error}") from error


def render(
    template: jinja2.Template, values: dict[str, Any], check_cancelled: Callable[[], None] | None = None
) -> str:
    """Run a template with a budget of its own."""
    budget = Budget(check_cancelled)
    run = partial(_render, template, values, budget)
    return _core.call_deep(run, budget.end) if template in _recursive else run()


def _render(template: jinja2.Template, values: dict[str, Any], budget: Budget) -> str:
    import jinja2

    token = _budget.set(budget)
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


def measured(value: object) -> int:
    """`weight` of a value that can be read within the limits."""
    if (size := weight(value)) > MAX_CHARS:
        raise LimitExceededError(f"it compares or searches a value of more than {MAX_CHARS} characters")
    return size


def length(value: Any) -> int:
    """Number of entries of a value; 0 if it has no length."""
    return len(value) if hasattr(value, "__len__") else 0


def entries(*values: object) -> int:
    """Memory of lists or dicts of the entries of the values that have a length, in characters."""
    return sum(length(value) * _entry_chars(value) for value in values)


def _entry_chars(value: object) -> int:
    match value:
        case str() | range():
            return OBJECT_CHARS
        case Mapping():
            return 16 * ENTRY_CHARS
        case _:
            return ENTRY_CHARS


def pieces(text: str, separator: str | None) -> int:
    """Maximum number of strings that `split` returns."""
    if separator:
        return text.count(separator) + 1
    if text.isascii():
        return sum(map(text.count, " \t\n\r\v\f\x1c\x1d\x1e\x1f")) + 1
    return len(text) // 2 + 1


def made_chars(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Maximum length of the text or list that a filter, or a method of a string, makes of a value."""
    if name in _READING:
        return 0
    if name in _LISTING:
        return entries(value)
    if (size := weight(value)) > MAX_CHARS:
        return size
    given = (*args, *kwargs.values())
    widest = max(map(width, given), default=0)
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            return size + widest
        case "wordwrap" | "urlize" | "striptags" | "pprint":
            # The time of these filters is quadratic.
            return size * (1 + size // 64) * (1 + weight(given))
        case "expandtabs":
            return size + int(value.count("\t")) * (widest if given else 8)
        case "indent":
            return size + (str(value).count("\n") + 1) * (widest if given else 4)
        case "replace":
            old, new = (*args, *(kwargs.get(key, "") for key in ("old", "new")[len(args) :]))[:2]
            are_texts = isinstance(value, str) and isinstance(old, str)
            return size + int(value.count(old) if are_texts else size) * weight(new)
        case "join":
            return size + length(value) * widest
        case "format" | "format_map":
            return formatted_chars(str(value), given)
        case "tojson":
            return size * (1 + min(widest, MAX_CHARS))
        case "batch" | "slice":
            return entries(value) + widest
        case "title":
            return size * OBJECT_CHARS // 2
        case "split" | "rsplit" | "splitlines" | "wordcount":
            separator = next((item for item in given if isinstance(item, str)), None)
            return size + pieces(str(value), separator if name.endswith("split") else None) * OBJECT_CHARS
        case "sum":
            # A sum of lists copies the list for each of them.
            return size * length(value) if any(isinstance(item, (list, tuple)) for item in given) else 0
        case "round" if widest > MAX_BITS:
            raise LimitExceededError(f"it computes with integers of more than {MAX_BITS} bits")
        case "e" | "escape" | "forceescape":
            return 6 * size
        case "xmlattr":
            return size * (10 + weight(given))
        case "encode" | "to_bytes" | "translate":
            raise LimitExceededError(f"{name}() is not available")
        case _:
            return size


# Filters that make neither text nor a list. A template may apply them to all messages for every message.
_READING = frozenset("abs attr count d default first float int last length random".split())  # noqa: SIM905
# Filters that compare the entries of a list.
_SORTING = frozenset("dictsort groupby max min sort unique".split())  # noqa: SIM905
_NEEDING_LENGTH = _SORTING | {"join", "sum"}
# Filters that return an iterator, or a list of the same entries.
_LISTING = _SORTING | frozenset(
    "items list map reject rejectattr reverse select selectattr".split()  # noqa: SIM905
)
# Filters that make numbers or texts.
_MAKING_SMALL = frozenset("_compare _concatenate count int length lower string trim upper".split())  # noqa: SIM905
# Filters that pass over the entries of any iterable.
_PASSING = frozenset("map reject rejectattr select selectattr".split())  # noqa: SIM905
# Filters and methods that can compare the searched text at each position of the text.
_SEARCHING = frozenset("lstrip rfind rindex rpartition rsplit rstrip strip trim".split())  # noqa: SIM905
# Comparisons by their names in Jinja.
_COMPARING: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja passes its context as the first argument to filters with this attribute.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    needs_length, is_passing, is_list = name in _NEEDING_LENGTH, name in _PASSING, name == "list"
    is_sorting, is_searching = name in _SORTING, name in _SEARCHING

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        head, value, rest = args[:skip], args[skip], args[skip + 1 :]
        if needs_length:
            value = _sized(value)
        budget = _budget.get()
        budget.make(made_chars(name, value, rest, kwargs))
        if is_sorting:
            budget.read(measured(value) * (1 + length(value).bit_length()))
        elif is_searching and (rest or kwargs):
            _charge_search(value, (rest, kwargs))
        elif is_passing:
            value = _passed(value, budget, weight((rest, kwargs)))
        made = function(*head, value, *rest, **kwargs)
        if is_list and not hasattr(value, "__len__"):
            budget.make(entries(made))
        return made

    return bounded


def _charge_search(text: Any, wanted: object) -> None:
    """Charge a search that can compare the wanted text at each position of the text."""
    if isinstance(text, str):
        _budget.get().read(len(text) * weight(wanted))


def _passed(items: Iterable[Any], budget: Budget, chars: int) -> Iterator[Any]:
    """The items; a filter reads its arguments, such as the name of an attribute, for each of them."""
    chars = 1 + chars // 64
    for item in items:
        budget.read(chars)
        yield item


def _bounded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(left: Any, right: Any) -> Any:
        _charge_comparison(left, right, is_membership=name == "in")
        return function(left, right)

    return bounded


def _compare(left: Any, *others: Any) -> Any:
    """A chain of comparisons: operators and their right sides, in turns."""
    result = True
    for name, right in zip(others[::2], others[1::2], strict=True):
        _charge_comparison(left, right, is_membership=name in ("in", "notin"))
        result = _COMPARING[name](left, right)
        if not result:
            break
        left = right
    return result


def _charge_comparison(left: Any, right: Any, *, is_membership: bool) -> None:
    """Charge the parts of containers that are compared."""
    is_container = not isinstance(left, str) and hasattr(left, "__len__")
    if is_membership:
        chars = length(right) * (measured(left) if is_container else 1)
        _budget.get().read(0 if isinstance(right, str) else chars)
    elif is_container and not isinstance(right, str) and hasattr(right, "__len__"):
        _budget.get().read(measured(left if len(left) <= len(right) else right))


def _key(key: Any) -> Any:
    """The key of a dict, which is hashed."""
    if isinstance(key, tuple):
        _budget.get().read(measured(key))
    return key


def _sized(items: Any) -> Any:
    """The items, with a length: those of a generator as a list."""
    return items if hasattr(items, "__len__") else list(items)


def _slice(value: Any, *bounds: int | None) -> Any:
    part = slice(*bounds)
    if hasattr(value, "__len__"):
        _budget.get().make(
            len(range(*part.indices(len(value)))) * (1 if isinstance(value, str) else ENTRY_CHARS)
        )
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
    if length(layout) > MAX_LAYOUT_CHARS:
        raise LimitExceededError(f"it formats a date with more than {MAX_LAYOUT_CHARS} characters")
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
        """Adds a step to every repeated body, and replaces operations by measured filters."""

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            parts = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
            return nodes.Filter(parts, "_concatenate", [], [], None, None, lineno=node.lineno)

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            static = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            literals = node.find_all((nodes.List, nodes.Tuple, nodes.Dict))
            static += ENTRY_CHARS * sum(len(literal.items) for literal in literals)
            self.generic_visit(node)
            count = nodes.Const(static, lineno=node.lineno)
            step = nodes.Filter(count, "_loop_step", [], [], None, None, lineno=node.lineno)
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
            return node

        visit_Macro = visit_CallBlock = visit_Block = visit_For  # noqa: N815

        def visit_Getitem(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            if not isinstance(node.arg, nodes.Slice):
                node.arg = self._checked_key(node.arg)
                return node
            bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
            return nodes.Filter(node.node, "_slice", bounds, [], None, None, lineno=node.lineno)

        def visit_Dict(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            for pair in node.items:
                pair.key = self._checked_key(pair.key)
            return node

        def _checked_key(self, key: Any) -> Any:
            if isinstance(key, nodes.Const):
                return key
            return nodes.Filter(key, "_key", [], [], None, None, lineno=key.lineno)

        def visit_Compare(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            operands = [node.expr, *(operand.expr for operand in node.ops)]
            pairs = itertools.pairwise(map(_is_small, operands))
            if all(left or right for left, right in pairs):
                return node
            others = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
            return nodes.Filter(node.expr, "_compare", others, [], None, None, lineno=node.lineno)

    def _is_small(node: Any) -> bool:
        """Whether a comparison with the node's value takes little time: it is no container, or a constant."""
        match node:
            case nodes.Const() | nodes.Compare() | nodes.Not() | nodes.Test():
                return True
            case nodes.List() | nodes.Tuple():
                return all(isinstance(item, nodes.Const) for item in node.items)
            case nodes.Add() | nodes.Sub():  # of a number and a container is an error
                sides = (node.left, node.right)
                return any(isinstance(side, nodes.Const) and isinstance(side.value, int) for side in sides)
            case nodes.Filter():
                return node.name in {
                    "count",
                    "int",
                    "length",
                    "lower",
                    "string",
                    "trim",
                    "upper",
                    "_concatenate",
                }
            case _:
                return False

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
            tree = super()._parse(source, name, filename)
            stack: list[nodes.Node] = [tree]
            num_nodes = 0
            while stack:
                node = stack.pop()
                # To compile a function takes as long as to compile several other nodes.
                num_nodes += 8 if isinstance(node, (nodes.Macro, nodes.Block, nodes.CallBlock)) else 1
                stack.extend(node.iter_child_nodes())
            if num_nodes > MAX_NODES:
                raise LimitExceededError(f"it has {num_nodes} nodes; the limit is {MAX_NODES}")
            metered: nodes.Template = Metered().visit(tree)
            return metered

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
                    size = len(value) if isinstance(value, str) else entries(value)
                    budget.make(size * max(times, 0))
            elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                are_texts = isinstance(left, str) and isinstance(right, str)
                budget.make(len(left) + len(right) if are_texts else entries(left, right))
            elif operator == "%" and isinstance(left, str):
                budget.make(formatted_chars(left, right if isinstance(right, tuple) else (right,)))
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            return wrapped and _bounded_method(value.__self__, value.__name__, wrapped)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            budget = _budget.get()
            if isinstance(owner, str) and name == "join" and args:
                args = (_sized(args[0]), *args[1:])
                chars = made_chars(name, args[0], (owner,), {})
            elif isinstance(owner, (str, int)):
                chars = made_chars(name, owner, args, kwargs)
                if args and name in _SEARCHING:
                    _charge_search(owner, args)
            else:
                # The arguments may be copied, for example by `dict`.
                chars = entries(owner if name == "copy" else (), *args, *kwargs.values())
                if isinstance(function, types.BuiltinMethodType) or name == "changed":
                    # Entries are compared with the arguments, or these are hashed.
                    compared = length(owner) if name in ("index", "count") else 1
                    budget.read(compared * measured(args) if args else 0)
            budget.make(chars)
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
    } | {
        "_compare": _compare,
        "_concatenate": _concatenate,
        "_key": _key,
        "_loop_step": _loop_step,
        "_slice": _slice,
    }
    compares = (operator.eq, operator.ne, operator.gt, operator.ge, operator.lt, operator.le)
    for name, function in environment.tests.items():
        if function in compares or name == "in":
            environment.tests[name] = _bounded_test(name, function)  # type: ignore[arg-type]
    return environment
