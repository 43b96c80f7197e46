"""The costs of the operations of a chat template, and the limits on their sum.

Every step of a template is charged to a `Budget`. Operations that can make long texts or lists, or that read
whole values (comparison, membership, sorting, hashing), are measured *before* they run; loops, calls and the
items of filters such as `map` check the time. A value that contains others several times counts each of them
as often as it is read. `_chat_sandbox.py` calls these functions for the operations of Jinja.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import re
import string
import sys
import time
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

MAX_CHARS = 8 << 20
"""Maximum length of any text made by a template, including its result."""

MAX_TOTAL_CHARS = 32 * MAX_CHARS
"""Maximum total length of all texts made during one rendering."""

MAX_SECONDS = 10.0
"""Maximum duration of one rendering."""

MAX_BITS = 4096
"""Maximum size of an integer."""

MAX_INTEGER_CHARS = MAX_BITS // 6
"""Maximum number of digits of an integer, in any base."""

MAX_READ_CHARS = 32 * MAX_CHARS
"""Maximum total length of the values that are compared, sorted or searched during one rendering."""

MAX_DEPTH = 200
"""Maximum nesting of a value that is read. The hash of a tuple recurses without a check of the stack."""

MAX_CHAIN = 50
"""Maximum number of generators of which each reads the next one. They are freed by recursion."""

ENTRY_CHARS = 4
"""Memory of an entry of a list, in characters."""

OBJECT_CHARS = 32
"""Memory of a new object in a list, in characters."""


class LimitExceededError(Exception):
    """A template exceeds a limit."""


class Budget:
    """The resources used by one rendering."""

    def __init__(
        self, check_cancelled: Callable[[], None] | None = None, seconds: float | None = None
    ) -> None:
        self.check_cancelled = check_cancelled
        self._seconds = MAX_SECONDS if seconds is None else seconds
        self.deadline = time.monotonic() + self._seconds
        self.chars = 0
        self.chars_read = 0
        self._chains: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def end(self) -> None:
        """End the rendering at its next step."""
        self.deadline = -math.inf

    def tick(self) -> None:
        """Check the time, and whether the text is still wanted."""
        if self.check_cancelled is not None:
            self.check_cancelled()
        if time.monotonic() > self.deadline:
            raise LimitExceededError(f"it runs for more than {self._seconds} seconds")

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

    def chain(self, made: object, sources: Iterable[object]) -> None:
        """Record a new generator that reads others."""
        read = [self._chains.get(source, 0) for source in sources if isinstance(source, types.GeneratorType)]
        number = 1 + max(read, default=0)
        if number > MAX_CHAIN:
            raise LimitExceededError(f"it applies more than {MAX_CHAIN} filters without making a list")
        self._chains[made] = number


current_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("penstock.budget")


#: Sets, and parts of dicts that behave as sets.
SETS: tuple[type[Collection[Any]], ...] = (set, type({}.keys()), type({}.items()))
_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS: tuple[type[Collection[Any]], ...] = (list, tuple, type({}.values()), *_MAPPINGS, *SETS)


def weight(value: object) -> int:
    """Approximate length of a value's text. Counting stops beyond `MAX_CHARS`.

    Raises `LimitExceededError` if the value is nested deeper than `MAX_DEPTH`.
    """
    if isinstance(value, str):
        return len(value) + 2
    total = depth = 0
    level: list[Any] = [value]
    while level:
        if depth > MAX_DEPTH:
            raise LimitExceededError(f"it reads a value that is nested deeper than {MAX_DEPTH}")
        depth += 1
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                total += len(item) + 2
            elif isinstance(item, int):
                total += 20 + item.bit_length() // 3
            elif isinstance(item, _CONTAINERS):
                total += 2 * len(item) + 2
                if total > MAX_CHARS:
                    return total
                inner.extend(item)
                if isinstance(item, _MAPPINGS):
                    inner.extend(item.values())
            else:
                total += 20
                inner.extend(_parts(item))
        level = inner
    return total


def _parts(value: Any) -> Iterable[object]:
    """The values in the text of a value that is no container."""
    match value:
        case range():
            return (value.start, value.stop, value.step)
        case types.MethodType():
            return (value.__self__,)
        case _ if type(value).__name__ == "Namespace":
            return (value._Namespace__attrs,)  # noqa: SLF001 - the name that Jinja's class gives it
        case _:
            return ()


def width(value: object) -> int:
    """Maximum characters that an argument adds in one place: an integer's value, a text's length."""
    return abs(int(value)) if isinstance(value, int) else weight(value)


def percent_chars(text: str, values: Iterable[object]) -> int:
    """Maximum length of `text % values`. Widths are numbers in the text, or arguments of `%*d`."""
    values = list(values)
    widths = [_largest_number(text)]
    if "*" in text:
        widths += [width(value) for value in values]
    return len(text) + text.count("%") * (max(widths) + weight(values))


def format_chars(text: str, values: Iterable[object]) -> int:
    """Maximum length of `text.format(...)`. Widths are numbers in the text, or those of nested fields.

    A nested field is refused if the width has other parts, too: they could make its number longer.
    """
    values = list(values)
    widths = [_largest_number(text)]
    try:
        specs = [spec for _, _, spec, _ in string.Formatter().parse(text) if spec and "{" in spec]
    except ValueError:  # which the call raises, too
        specs = []
    if specs:
        if not all(map(_NESTED.fullmatch, specs)):
            raise LimitExceededError("it formats with a width that has several parts")
        for value in values:
            parts = value.values() if isinstance(value, _MAPPINGS) else (value,)
            widths += [abs(part) for part in parts if isinstance(part, int)]
            widths += [_largest_number(str(part)) for part in parts if isinstance(part, (str, float))]
    return len(text) + text.count("{") * (max(widths) + weight(values))


#: A format specification that takes its width from an argument.
_NESTED = re.compile(r"[<>^]?\{\w*\}[ds]?")

#: Digits of a number in a format beyond which it is taken as too large; there may be zeros among them.
_MAX_DIGITS = 20


def _largest_number(text: str) -> int:
    """The largest number in a text, or a larger one."""
    runs = re.findall(r"\d+", text)
    return max((int(run) if len(run) <= _MAX_DIGITS else 10**_MAX_DIGITS for run in runs), default=0)


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
    if name == "int" and isinstance(value, str) and len(value) > MAX_INTEGER_CHARS:
        raise LimitExceededError(f"it computes with integers of more than {MAX_BITS} bits")
    if name == "round" and hasattr(value, "__len__"):
        raise LimitExceededError("it rounds a value that is no number")
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
            return format_chars(str(value), given)
        case "%":
            return percent_chars(str(value), given)
        case "tojson":
            # `ensure_ascii` escapes a character with up to 12 characters.
            escaped = 12 if kwargs.get("ensure_ascii", args[0] if args else False) else 1
            indent = max((width(argument) for argument in given if not isinstance(argument, bool)), default=0)
            return size * escaped * (1 + min(indent, MAX_CHARS))
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
        case "encode" | "from_bytes" | "to_bytes" | "translate":
            raise LimitExceededError(f"{name}() is not available")
        case _:
            return size


# Filters that make neither text nor a list. A template may apply them to all messages for every message.
_READING = frozenset("abs attr count d default first float int last length random".split())  # noqa: SIM905
# Filters that compare the entries of a list.
SORTING = frozenset("dictsort groupby max min sort unique".split())  # noqa: SIM905
NEEDING_LENGTH = SORTING | {"join", "sum"}
# Filters that return an iterator, or a list of the same entries.
_LISTING = SORTING | frozenset(
    "items list map reject rejectattr reverse select selectattr".split()  # noqa: SIM905
)
# Filters that pass over the entries of any iterable.
PASSING = frozenset("map reject rejectattr select selectattr".split())  # noqa: SIM905
# Filters and methods that can compare the searched text at each position of the text.
SEARCHING = frozenset("lstrip rfind rindex rpartition rsplit rstrip strip trim".split())  # noqa: SIM905


def charge_search(text: Any, wanted: object) -> None:
    """Charge a search that can compare the wanted text at each position of the text."""
    if isinstance(text, str):
        current_budget.get().read(len(text) * weight(wanted))


def passed(items: Iterable[Any], budget: Budget, chars: int) -> Iterator[Any]:
    """The items, with a charge for each of them."""
    for item in items:
        budget.read(chars)
        yield item


def compared_chars(text: str) -> int:
    """The charge for a comparison of a text, which takes less time than to read its characters."""
    return 1 + len(text) // 16


def charge_comparison(left: Any, right: Any) -> None:
    """Charge the parts of two values that are compared."""
    are_texts = isinstance(left, str), isinstance(right, str)
    if all(are_texts):
        if len(left) == len(right) > ENTRY_CHARS * OBJECT_CHARS:
            current_budget.get().read(compared_chars(left))
    elif not any(are_texts) and hasattr(left, "__len__") and hasattr(right, "__len__"):
        current_budget.get().read(measured(left if len(left) <= len(right) else right))


def contains(left: Any, right: Any) -> bool:
    """Whether a value is in a text or container, or among the items of an iterator, with a charge."""
    budget = current_budget.get()
    if isinstance(right, str):
        budget.read(compared_chars(right))
    elif isinstance(left, str) and isinstance(right, (dict, *SETS)):
        budget.tick()
    else:
        is_container = not isinstance(left, str) and hasattr(left, "__len__")
        chars = measured(left) if is_container else compared_chars(left) if isinstance(left, str) else 1
        if hasattr(right, "__len__"):
            budget.read(len(right) * chars)
        else:
            right = passed(right, budget, chars)
    return left in right


def charge_key(key: Any, num_keys: int) -> None:
    """Charge the hash of a key, and its comparison with the keys of a dict or set that have the same hash.

    There are many such keys only if they are neither texts nor small integers.
    """
    if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < sys.hash_info.modulus):
        current_budget.get().read(measured(key) * (1 + num_keys))


def charge_keys(*collections: Iterable[Any]) -> None:
    """Charge the keys of collections that become one dict or set."""
    for number, key in enumerate(itertools.chain(*collections)):
        charge_key(key, number)


def _charge_text(value: object) -> None:
    current_budget.get().make(weight(value))


def _charge_name(_environment: object, name: object) -> None:
    charge_key(name, 0)


def _charge_remainder(value: object, divisor: object = 2) -> None:
    if isinstance(value, str):  # which is formatted
        current_budget.get().make(percent_chars(value, (divisor,)))


#: The costs of tests other than comparisons.
TEST_COSTS: dict[str, Callable[..., None]] = {
    "lower": _charge_text,
    "upper": _charge_text,
    "filter": _charge_name,
    "test": _charge_name,
    "odd": _charge_remainder,
    "even": _charge_remainder,
    "divisibleby": _charge_remainder,
}


def sized(items: Any) -> Any:
    """The items, with a length: those of a generator as a list."""
    return items if hasattr(items, "__len__") else list(items)
