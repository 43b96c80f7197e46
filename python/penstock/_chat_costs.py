"""The costs of the operations of a chat template, and the limits on their sum.

Every step of a template is charged to a `Budget`. Operations that can make long texts or lists, or that read
whole values (comparison, membership, sorting, hashing), are measured *before* they run; loops, calls and the
items of filters such as `map` check the time. A value that contains others several times counts each of them
as often as it is read. `_chat_sandbox.py` calls these functions for the operations of Jinja.
"""

from __future__ import annotations

import contextvars
import math
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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

ENTRY_CHARS = 4
"""Memory of an entry of a list, in characters."""

OBJECT_CHARS = 32
"""Memory of a new object in a list, in characters."""


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


current_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("penstock.budget")


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
    if name == "int" and isinstance(value, str) and len(value) > MAX_INTEGER_CHARS:
        raise LimitExceededError(f"it computes with integers of more than {MAX_BITS} bits")
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
    """The items; a filter reads its arguments, such as the name of an attribute, for each of them."""
    chars = 1 + chars // 64
    for item in items:
        budget.read(chars)
        yield item


def charge_comparison(left: Any, right: Any, *, is_membership: bool) -> None:
    """Charge the parts of containers that are compared."""
    is_container = not isinstance(left, str) and hasattr(left, "__len__")
    if is_membership:
        chars = length(right) * (measured(left) if is_container else 1)
        current_budget.get().read(0 if isinstance(right, str) else chars)
    elif is_container and not isinstance(right, str) and hasattr(right, "__len__"):
        current_budget.get().read(measured(left if len(left) <= len(right) else right))


def sized(items: Any) -> Any:
    """The items, with a length: those of a generator as a list."""
    return items if hasattr(items, "__len__") else list(items)
