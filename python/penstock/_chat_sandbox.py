"""The sandbox in which chat templates run: Jinja's own sandbox, Hugging Face's dialect, resource limits.

Jinja's sandbox keeps a template from Python's internals, but does not limit its resources: consider
`{{ 'x' * 10**10 }}`, nested loops, or a string that doubles itself. Here every operation is charged to a
budget; `_chat_costs.py` has the costs and the limits. Templates cannot define operators, so no single
operation takes long. The size of a template limits the time to compile it.

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

Jinja and the compiler of Python recurse as deep as a template is nested, and macros and blocks may call
themselves, so `chat.py` compiles and runs templates with `call_deep`.

jinja2 is imported inside functions, so that importing penstock does not import it.
"""

from __future__ import annotations

import functools
import json
import operator
import types
from datetime import datetime
from typing import TYPE_CHECKING, Any

from penstock._chat_costs import (
    ENTRY_CHARS,
    MAX_BITS,
    NEEDING_LENGTH,
    PASSING,
    SEARCHING,
    SETS,
    SORTING,
    TEST_COSTS,
    Budget,
    LimitExceededError,
    charge_comparison,
    charge_key,
    charge_keys,
    charge_search,
    compared_chars,
    contains,
    current_budget,
    entries,
    length,
    made_chars,
    measured,
    passed,
    percent_chars,
    sized,
    weight,
)
from penstock._renderer import CompileError, RenderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import jinja2

MAX_SOURCE_CHARS = 256 << 10
"""Maximum length of a template."""

MAX_NODES = 10_000
"""Maximum number of nodes of a parsed template. Published templates have at most a third."""

MAX_LAYOUT_CHARS = 1000
"""Maximum length of a layout of `strftime_now`."""

# Filters that make numbers or texts.
_MAKING_SMALL = frozenset(
    "_compare _concatenate count int length lower string trim upper".split()  # noqa: SIM905
)
# Comparisons by their names in Jinja.
_COMPARING: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": contains,
    "notin": lambda left, right: not contains(left, right),
}

# Maximum length of a text that takes little time to compare with each entry of a list.
_MAX_SHORT = 64


def compile_template(source: str) -> jinja2.Template:
    """Compile a template. Syntax errors name the line."""
    import jinja2

    if len(source) > MAX_SOURCE_CHARS:
        raise CompileError(f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARS}")
    try:
        return _environment().from_string(source)
    except LimitExceededError as error:
        raise CompileError(str(error)) from error
    except jinja2.TemplateSyntaxError as error:
        raise CompileError(f"line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise CompileError(f"it cannot be compiled: {error}") from error


def reserved_names() -> frozenset[str]:
    """The names of the functions that every template can call."""
    return frozenset(_environment().globals)


def render(template: jinja2.Template, values: dict[str, Any], budget: Budget) -> str:
    """Run a template with a budget of its own."""
    import jinja2

    token = current_budget.set(budget)
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
    except RecursionError as error:
        raise RenderError("it recurses too deeply") from error
    except Exception as error:  # any error of an expression in the template
        raise RenderError(f"{type(error).__name__}: {error}") from error
    finally:
        current_budget.reset(token)
    return "".join(parts)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # Jinja passes its context as the first argument to filters with this attribute.
    skip = 1 if hasattr(function, "jinja_pass_arg") else 0

    needs_length, is_passing, is_list = name in NEEDING_LENGTH, name in PASSING, name == "list"
    is_sorting, is_searching, is_sum = name in SORTING, name in SEARCHING, name == "sum"
    reads_arguments = name not in ("d", "default")
    cost = "%" if name == "format" else name  # the filter is the operator

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        head, value, rest = args[:skip], args[skip], args[skip + 1 :]
        source = value
        if needs_length:
            value = sized(value)
        budget = current_budget.get()
        budget.make(made_chars(cost, value, rest, kwargs))
        # An argument may be the name of an attribute or of a filter, which is hashed.
        chars = measured((rest, kwargs)) if (rest or kwargs) and reads_arguments else 0
        if is_sorting:
            budget.read(measured(value) * (1 + length(value).bit_length()))
        if is_sorting or is_sum:
            budget.read(length(value) * chars * ENTRY_CHARS)
        elif is_searching and chars:
            charge_search(value, (rest, kwargs))
        elif is_passing:
            # For each item, a filter reads its arguments, such as the name of an attribute.
            value = passed(value, budget, 1 + chars // 64)
        made = function(*head, value, *rest, **kwargs)
        if is_list and not hasattr(value, "__len__"):
            budget.make(entries(made))
        if isinstance(made, types.GeneratorType):
            budget.chain(made, (source, *rest, *kwargs.values()))
        return made

    return bounded


def _bounded_test(charge: Callable[..., None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        charge(*args, *kwargs.values())
        return function(*args, **kwargs)

    return bounded


def _compare(left: Any, *others: Any) -> Any:
    """A chain of comparisons: operators and their right sides, in turns."""
    result = True
    for name, right in zip(others[::2], others[1::2], strict=True):
        if name not in ("in", "notin"):
            charge_comparison(left, right)
        result = _COMPARING[name](left, right)
        if not result:
            break
        left = right
    return result


def _key(key: Any) -> Any:
    """The key of a dict, which is hashed."""
    charge_key(key, 0)
    return key


def _slice(value: Any, *bounds: int | None) -> Any:
    part = slice(*bounds)
    if hasattr(value, "__len__"):
        current_budget.get().make(
            len(range(*part.indices(len(value)))) * (1 if isinstance(value, str) else ENTRY_CHARS)
        )
    return value[part]


def _concatenate(parts: list[Any]) -> str:
    current_budget.get().make(sum(map(weight, parts)))
    return "".join(map(str, parts))


def _loop_step(static_chars: int) -> None:
    budget = current_budget.get()
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
    if args and not hasattr(args[0], "keys"):
        pairs = [(key, value) for key, value in args[0]]
        charge_keys(key for key, _ in pairs)
        args = (pairs, *args[1:])
    return dict(*args, **kwargs)


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment shared by all templates."""
    import jinja2
    from jinja2 import ext, filters, nodes, sandbox, utils, visitor

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
            lefts = [node.expr, *(operand.expr for operand in node.ops)]
            if all(map(_is_quick, lefts, node.ops)):
                return node
            others = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
            return nodes.Filter(node.expr, "_compare", others, [], None, None, lineno=node.lineno)

    def _is_quick(left: Any, operand: Any) -> bool:
        """Whether a comparison takes little time."""
        if _is_small(operand.expr):
            return True
        if operand.op in ("in", "notin"):
            return isinstance(left, nodes.Const) and length(left.value) <= _MAX_SHORT
        return _is_small(left)

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
                return node.name in _MAKING_SMALL
            case _:
                return False

    class Namespace(utils.Namespace):
        """`namespace()` without names that have a meaning in Python."""

        def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self` can be a keyword
            attributes = _make_dict(*args[1:], **kwargs)
            for name in attributes:
                _reject_private(name)
            utils.Namespace.__init__(args[0], attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _reject_private(name)
            super().__setitem__(name, value)

    def _reject_private(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        """Jinja's sandbox, in which every operation that can make long texts is measured first."""

        intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

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
            budget = current_budget.get()
            if isinstance(left, int) and isinstance(right, int):
                factor = max(right, 1) if operator == "**" else 1
                bits = max(left.bit_length(), 1) * factor + right.bit_length()
                if bits > MAX_BITS:
                    raise LimitExceededError(f"it computes with integers of more than {MAX_BITS} bits")
            elif operator == "*":
                times, value = (left, right) if isinstance(left, int) else (right, left)
                if isinstance(times, int) and hasattr(value, "__len__"):
                    size = len(value) if isinstance(value, str) else entries(value)
                    budget.make(size * max(times, 0))
            elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
                are_texts = isinstance(left, str) and isinstance(right, str)
                budget.make(len(left) + len(right) if are_texts else entries(left, right))
            elif operator == "-" and (isinstance(left, SETS) or isinstance(right, SETS)):
                left, right = sized(left), sized(right)
                charge_keys(left, right)
            elif operator == "%" and isinstance(left, str):
                budget.make(percent_chars(left, right if isinstance(right, tuple) else (right,)))
            return super().call_binop(context, operator, left, right)

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            return wrapped and _bounded_method(value.__self__, value.__name__, wrapped)

        def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
            budget = current_budget.get()
            if isinstance(owner, str) and name == "join" and args:
                args = (sized(args[0]), *args[1:])
                chars = made_chars(name, args[0], (owner,), {})
            elif isinstance(owner, (str, int)) or owner is int:
                chars = made_chars(name, owner, args, kwargs)
                if args and name in SEARCHING:
                    charge_search(owner, args)
                elif args and isinstance(args[0], tuple) and isinstance(owner, str):
                    # `startswith` and `endswith` compare each of the texts.
                    budget.read(len(args[0]) * compared_chars(owner))
            elif isinstance(owner, SETS):
                args = tuple(map(sized, args))
                charge_keys(owner, *args)
                chars = entries(owner, *args)
            elif name == "fromkeys" and args:
                args = (sized(args[0]), *args[1:])
                charge_keys(args[0])
                chars = entries(args[0])
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
            current_budget.get().make(made_chars(name, text, args, kwargs))
            return method(*args, **kwargs)

        return bounded

    def finalize(value: Any) -> Any:
        current_budget.get().make(weight(value))
        return value

    def raise_exception(message: object) -> None:
        current_budget.get().make(weight(message))
        raise jinja2.TemplateError(str(message))

    @jinja2.pass_environment
    def unique(
        environment: jinja2.Environment,
        items: Iterable[Any],
        case_sensitive: bool = False,  # noqa: FBT001, FBT002 - templates pass it by position, too
        attribute: str | int | None = None,
    ) -> Iterator[Any]:
        """`unique` of Jinja, with a charge for each key."""
        change_case = None if case_sensitive else filters.ignore_case
        find_key = filters.make_attrgetter(environment, attribute, change_case)
        keys: set[Any] = set()
        for item in items:
            key = find_key(item)
            charge_key(key, len(keys))
            if key not in keys:
                keys.add(key)
                yield item

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
    environment.filters |= {"tojson": _to_json, "unique": unique}
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
        charge = charge_comparison if function in compares else TEST_COSTS.get(name)
        if charge:
            environment.tests[name] = _bounded_test(charge, function)  # type: ignore[arg-type]
    environment.tests["in"] = contains
    return environment
