"""The definition files of value classes: results, statistics, the properties of a model."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from definitions import build, load, source_of

from text import joined, listed, paragraphs


@dataclass(frozen=True)
class ValueField:
    """A field or property of a value class."""

    name: str
    rust: str
    summary: str
    doc: str = ""
    python: str = ""
    python_out: str = ""
    kind: str = ""
    buckets: tuple[float, ...] = ()
    value: str = ""
    default: str = ""
    python_default: str = ""

    @property
    def is_json(self) -> bool:
        """Whether `to_dict` includes the value."""
        return "FloatArray" not in self.rust and self.rust != "PyAny"

    @property
    def python_in(self) -> str:
        """The type that the constructor takes."""
        return self.python or python_of(self.rust, is_input=True)

    @property
    def python_type(self) -> str:
        """The type of the property."""
        return self.python_out or self.python or python_of(self.rust, is_input=False)

    @property
    def literal_default(self) -> str:
        """The default of the constructor's argument, or an ellipsis if it is not a literal."""
        if self.python_default or self.default:
            return self.python_default or "..."
        head = self.rust.partition("<")[0]
        literals = {"Option": "None", "Vec": "()", "String": "''", "usize": "0", "u64": "0", "f64": "0.0"}
        arcs = {"Arc<str>": "''", "Arc<[u32]>": "()"}
        return arcs.get(self.rust) or literals.get(head, "...")

    def description(self) -> str:
        """The documentation of the property."""
        return paragraphs(f"{self.summary}.", joined(self.doc))

    def bullet(self) -> str:
        """The item of the list in the documentation of the class."""
        return f"- `{self.name}`: {joined(f'{self.summary}. {self.doc}')}"


@dataclass(frozen=True)
class ValueClass:
    """A class that the engine returns."""

    name: str
    summary: str
    fields: tuple[ValueField, ...]
    #: Properties that are not fields; their values are those of methods of the same name.
    properties: tuple[ValueField, ...] = ()
    doc: str = ""
    rust_name: str = ""
    rust_path: str = ""
    first_of: str = ""
    first_class: str = ""
    first_except: tuple[str, ...] = ()
    own_json: str = ""
    #: Whether each argument of the constructor may be left out.
    has_defaults: bool = False
    beside: str = ""

    @classmethod
    def load(cls, stem: str) -> list[ValueClass]:
        """The classes of a file."""
        classes = []
        for table in load(stem)["class"]:
            where = f"{source_of(stem)}: {table.get('name', 'a class without a name')}"
            defaults = table.pop("field_defaults", {})
            parts = {
                key: tuple(build(ValueField, where, defaults | entry) for entry in table.pop(singular, []))
                for key, singular in (("fields", "field"), ("properties", "property"))
            }
            classes.append(build(cls, where, table, **parts))
        return classes

    @property
    def rust(self) -> str:
        """The name of the Rust struct."""
        return self.rust_name or self.name

    @property
    def is_constructed(self) -> bool:
        """Whether the struct is generated in the Python module, with the expressions of its fields."""
        return any(entry.value for entry in self.fields)

    def delegated(self, classes: list[ValueClass]) -> list[ValueField]:
        """The fields of another class that the class has, too: those of the first item of a field."""
        other = next((other for other in classes if other.name == self.first_class), None)
        return [entry for entry in other.fields if entry.name not in self.first_except] if other else []

    def arguments(self, classes: list[ValueClass]) -> list[ValueField]:
        """The arguments of the constructor: with defaults also those of the first item."""
        return [*self.fields, *(self.delegated(classes) if self.has_defaults else ())]

    def description(self) -> str:
        """The documentation of the class."""
        bullets = "\n".join(entry.bullet() for entry in self.fields + self.properties)
        return paragraphs(f"{self.summary}.", self.doc.strip(), bullets)

    def json_description(self) -> str:
        """The documentation of `to_dict`."""
        omitted = [entry.name for entry in self.fields if not entry.is_json]
        has_floats = any("float" in entry.python_type for entry in self.fields)
        facts = [
            self.own_json,
            "Infinite and NaN numbers are `None`." if has_floats else "",
            f"Without {listed(omitted)}, which can have millions of numbers." if omitted else "",
        ]
        return paragraphs(
            "Return a dict that `json.dumps` accepts.", " ".join(fact for fact in facts if fact)
        )

    def signature(self, classes: list[ValueClass]) -> str:
        """The first lines of the docstring, from which `inspect` reads the signature."""
        return f"{self.name}(*, {', '.join(map(self.argument, self.arguments(classes)))})\n--\n\n"

    def argument(self, entry: ValueField) -> str:
        """An argument of the constructor in its signature."""
        return f"{entry.name}={entry.literal_default}" if self.has_defaults else entry.name


PYTHON_OF_RUST = {
    "bool": "bool",
    "f32": "float",
    "f64": "float",
    "u32": "int",
    "u64": "int",
    "usize": "int",
    "String": "str",
    "str": "str",
    "FloatArray": "Tensor",
    "PyAny": "Any",
}


def python_of(rust: str, *, is_input: bool) -> str:
    """The Python type of a Rust type. What is a tuple in Python may be any sequence in an argument."""
    rust = rust.replace("TopLogprobs", "Vec<(u32, f32)>")
    head, _, rest = rust.partition("<")
    inner = rest.removesuffix(">")
    if head == "Option":
        return f"{python_of(inner, is_input=is_input)} | None"
    if head == "Arc":
        return python_of(inner, is_input=is_input)
    if head == "Vec" or rust.startswith("["):
        item = python_of(inner or rust[1:-1], is_input=is_input)
        return f"Sequence[{item}]" if is_input else f"tuple[{item}, ...]"
    if rust.startswith("("):
        return f"tuple[{', '.join(python_of(part, is_input=is_input) for part in rust[1:-1].split(', '))}]"
    return PYTHON_OF_RUST.get(rust, rust)


def stats_table(stats: ValueClass) -> str:
    """The entries of the engine's `stats!` table."""
    lines = ["stats! {"]
    numbers = [entry for entry in stats.fields if not entry.buckets]
    histograms = [entry for entry in stats.fields if entry.buckets]
    for entry in numbers:
        lines += [f"    /// {doc_of(entry)}", f"    {entry.name}: {entry.kind.capitalize()},"]
    lines.append("    ;")
    for entry in histograms:
        buckets = textwrap.wrap(", ".join(map(str, entry.buckets)), 112)
        lines += [
            f"    /// {doc_of(entry)}",
            f"    {entry.name}: [",
            *(f"        {line}" for line in buckets),
            "    ],",
        ]
    return "\n".join([*lines, "}", ""])


def doc_of(entry: ValueField) -> str:
    """The documentation of a field in a line."""
    return joined(f"{entry.summary}. {entry.doc}").strip()
