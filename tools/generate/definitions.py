"""The definition files of option classes and of enums, as objects; `__main__.py` describes their keys."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from text import joined, listed, number, paragraphs, quoted

ROOT = Path(__file__).resolve().parent.parent.parent
DEFINITIONS = ROOT / "rust" / "frontend" / "definitions"
INFINITY = float("inf")

#: The types of fields, with the Python types that the constructor accepts and that the property has.
TYPES: dict[str, tuple[str, str]] = {
    "int": ("int", "int"),
    "float": ("float", "float"),
    "bool": ("bool", "bool"),
    "text": ("str", "str"),
    "enum": ("", ""),
    "token_ids": ("Sequence[int]", "tuple[int, ...]"),
    "token_id_lists": ("Sequence[Sequence[int]]", "tuple[tuple[int, ...], ...]"),
    "texts": ("Sequence[str]", "tuple[str, ...]"),
    "custom": ("", ""),
}
#: The largest value of an integer without `max`, by its Rust type.
LARGEST = {"usize": 2**32 - 1, "u32": 2**32 - 1, "u64": 2**64 - 1}


def load(stem: str) -> dict[str, Any]:
    """The content of a definition file."""
    return tomllib.loads((DEFINITIONS / f"{stem}.toml").read_text(encoding="utf-8"))


def source_of(stem: str) -> str:
    """The path of a definition file in the repository."""
    return (DEFINITIONS / f"{stem}.toml").relative_to(ROOT).as_posix()


def build(cls: type, where: str, entry: dict[str, Any], **more: Any) -> Any:
    """An object of a dataclass from a table, or an error that names a key that is unknown or missing."""
    known = {key.name for key in fields(cls)} - more.keys()
    if unknown := sorted(entry.keys() - known):
        sys.exit(f"{where}: unknown keys: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    try:
        return cls(**entry, **more)
    except TypeError as error:
        sys.exit(f"{where}: {error}")


@dataclass(frozen=True)
class Enum:
    """An enum: Rust variants, each with its name in Python and its documentation."""

    name: str
    doc: str
    variants: dict[str, tuple[str, str]]
    #: The variant that `Default` gives, if any.
    default: str = ""
    #: Other names in Python of the variants that have some.
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def load_all(cls) -> dict[str, Enum]:
        enums = {}
        for name, table in load("enums").items():
            doc, default = table.pop("doc"), table.pop("default", "")
            variants = {variant: (value[0], value[1]) for variant, value in table.items()}
            aliases = {variant: tuple(value[2:]) for variant, value in table.items() if value[2:]}
            enums[name] = cls(name, doc, variants, default, aliases)
        return enums

    def names(self) -> list[str]:
        """The names in Python."""
        return [name for name, _ in self.variants.values()]

    def variant(self, name: str) -> str:
        """The variant with this name in Python."""
        return next(variant for variant, (other, _) in self.variants.items() if other == name)


ENUMS = Enum.load_all()


@dataclass(frozen=True)
class Field:
    """One entry of a definition file."""

    name: str
    group: str
    type: str
    summary: str
    doc: str = ""
    min: float | None = None
    max: float | None = None
    min_exclusive: bool = False
    max_exclusive: bool = False
    one_of: tuple[int, ...] = ()
    noun: str = ""
    min_items: int = 0
    max_items: int = 0
    max_inner: int = 0
    max_chars: int = 0
    enum: str = ""
    auto: bool = False
    mapping: bool = False
    default: Any = None
    default_text: str = ""
    engine_default: Any = None
    default_at_most: str = ""
    model_default: str = ""
    neutral: Any = None
    rust: str = ""
    reader: str = ""
    python: str = ""
    python_out: str = ""
    typed_dict: str = ""
    alias: str = ""
    cli: bool = True
    sampling: str = ""
    sampling_value: str = ""
    resolved_min: float | None = None
    resolved_max: float | None = None
    filter: bool = False
    given: str = ""
    binding: str = ""
    #: Sentences that say when the field is not allowed.
    conflicts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise TypeError(f"unknown type {self.type!r}; known: {', '.join(TYPES)}")
        if self.enum and self.enum not in ENUMS:
            raise TypeError(f"unknown enum {self.enum!r}; known: {', '.join(ENUMS)}")
        if (self.type == "enum") != bool(self.enum):
            raise TypeError("`enum` belongs to the type enum")
        if self.type == "int" and self.max is None:
            if self.rust not in LARGEST:
                raise TypeError(f"an int without `max` has one of the Rust types {', '.join(LARGEST)}")
            object.__setattr__(self, "max", LARGEST[self.rust])
        if self.type in ("int", "float") and (self.min is None or self.max is None):
            raise TypeError("a number needs `min`, and a float also `max` (inf if there is none)")
        if self.max_exclusive and (self.type != "float" or self.min_exclusive or self.max == INFINITY):
            raise TypeError("`max_exclusive` belongs to a float with a finite `max`, without `min_exclusive`")
        if self.type in ("text", "texts") and not self.max_chars:
            raise TypeError("a text needs `max_chars`")
        if self.type in ("texts", "token_ids", "token_id_lists") and not self.max_items:
            raise TypeError("a sequence needs `max_items`")
        needs_reader = self.type in ("custom", "token_id_lists") and not self.binding
        if needs_reader and not self.reader:
            raise TypeError(f"the type {self.type} needs a `reader`")
        if self.model_default and self.neutral is None:
            raise TypeError("`model_default` needs `neutral`")

    @property
    def is_optional(self) -> bool:
        """Whether the value can be `None`, which is then the default."""
        return self.default is None

    @property
    def values(self) -> list[str]:
        """The names of an enum's values."""
        return [*(["auto"] if self.auto else []), *ENUMS[self.enum].names()]

    @property
    def accepted_values(self) -> list[str]:
        """The names of an enum's values, and their aliases."""
        return [*self.values, *(name for names in ENUMS[self.enum].aliases.values() for name in names)]

    # ---- in words

    def range_in_words(self) -> str:
        """The values that are allowed, or nothing if every value of the type is."""
        parts = [self._items(), self._numbers()]
        if self.type == "enum":
            parts.append(", ".join(f'`"{value}"`' for value in self.values))
            parts += ["or a mapping"] if self.mapping else []
        return ", ".join(part for part in parts if part)

    def _numbers(self) -> str:
        if self.one_of:
            return ", ".join(map(str, self.one_of))
        if self.min is None or self.max is None:
            return ""
        low = f"above {number(self.min)}" if self.min_exclusive else number(self.min)
        if self.max in (INFINITY, LARGEST["u32"]):
            return low if self.min_exclusive else f"{low} or more"
        if self.max_exclusive:
            return f"{low} or more, below {number(self.max)}"
        return f"{low}, at most {number(self.max)}" if self.min_exclusive else f"{low} to {number(self.max)}"

    def _items(self) -> str:
        chars = f"1 to {self.max_chars} characters"
        if not self.max_items:
            return chars if self.max_chars else ""
        items = f"{self.min_items} to {self.max_items}" if self.min_items else f"up to {self.max_items}"
        inner = f"sequences of 1 to {self.max_inner} ids" if self.max_inner else "ids"
        return f"{items} {self.noun or (f'strings of {chars}' if self.max_chars else inner)}"

    def default_in_words(self) -> str:
        """The value that `None` stands for."""
        if self.default_text:
            return self.default_text
        if self.engine_default is not None:
            return number(self.engine_default)
        if self.model_default:
            return f"the model's, else {self.neutral}"
        if self.default in ([], ()):
            return "none"
        if isinstance(self.default, bool):
            return f"`{self.default}`"
        if isinstance(self.default, str):
            return f'`"{self.default}"`'
        return str(self.default)

    def description(self) -> str:
        """The documentation of the property."""
        facts = [fact for fact in (self._range_sentence(), f"Default: {self.default_in_words()}.") if fact]
        body = " ".join(part for part in (joined(self.doc), *self.conflicts) if part)
        return paragraphs(f"{self.summary}.", body, " ".join(facts))

    def bullet(self) -> str:
        """The item of the list in the documentation of the class."""
        sentences = [f"{self.summary}.", joined(self.doc), *self.conflicts, self._range_sentence()]
        sentences.append(f"Default: {self.default_in_words()}.")
        return f"- `{self.name}`: " + " ".join(sentence for sentence in sentences if sentence)

    def _range_sentence(self) -> str:
        words = self.range_in_words()
        return f"Range: {words}." if words else ""

    # ---- Python

    @property
    def python_in(self) -> str:
        """The type that the constructor accepts, besides `None`."""
        return self.python or TYPES[self.type][0] or self._literal("Mapping", self.accepted_values)

    @property
    def python_type(self) -> str:
        """The type of the property."""
        plain = self.python_out or TYPES[self.type][1] or self.python or self._literal("dict", self.values)
        return f"{plain} | None" if self.is_optional else plain

    @property
    def python_default(self) -> str:
        """The default as the signature shows it."""
        if isinstance(self.default, str):
            return f'"{self.default}"'
        return "()" if self.default == [] else repr(self.default)

    def _literal(self, mapping: str, values: list[str]) -> str:
        names = f"Literal[{quoted(values)}]"
        return f"{names} | {mapping}[str, Any]" if self.mapping else names


@dataclass(frozen=True)
class Conflict:
    """A rule that refuses fields beside others."""

    fields: list[str]
    when: str = ""
    because: str = ""
    at_most: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """The fields without their conditions."""
        return [entry.partition(" ")[0] for entry in self.fields]

    def sentence(self, name: str) -> str:
        """The documentation for one of the fields."""
        if name not in self.names():
            return ""
        if self.at_most or self.at_least:
            bounds = " and ".join(f"`{bound}`" for bound in (*self.at_most, *self.at_least))
            return f"{'At most' if self.at_most else 'At least'} {bounds}."
        if self.after:
            others = listed(other for other in self.after if other != name)
            return f"Not allowed with {others}: {self.because}."
        return f"Not allowed when {condition_in_words(self.when, '`')}: {self.because}."


def condition_in_words(when: str, quote: str) -> str:
    words = []
    for part in when.split(" and "):
        name = re.sub(r"^not | > .*| [!=]= .*| is None$", "", part)
        rest = {
            "not": " is False",
            ">": " is above ",
            "==": " is ",
            "!=": " is not ",
            "None": " is not given",
        }
        key = next((key for key in rest if key in part.split()), "")
        value = part.split()[-1] if key in (">", "==", "!=") else ""
        words.append(f"{quote}{name}{quote}{rest.get(key, ' is True')}{value}")
    return " and ".join(words)


@dataclass(frozen=True)
class Definition:
    """One definition file of an option class."""

    source: str
    groups: dict[str, str]
    fields: tuple[Field, ...]
    conflicts: tuple[Conflict, ...]
    name: str
    summary: str
    doc: str

    @classmethod
    def load(cls, stem: str) -> Definition:
        source, content = source_of(stem), load(stem)
        if unknown := content.keys() - {"class", "groups", "field", "conflict"}:
            sys.exit(f"{source}: unknown tables: {', '.join(sorted(unknown))}")
        conflicts = tuple(build(Conflict, source, entry) for entry in content.get("conflict", []))
        entries: list[Field] = []
        for entry in content["field"]:
            where = f"{source}: {entry.get('name', 'a field without a name')}"
            if "one_of" in entry:
                entry |= {"min": min(entry["one_of"]), "max": max(entry["one_of"])}
            sentences = (conflict.sentence(entry.get("name", "")) for conflict in conflicts)
            entries.append(build(Field, where, entry, conflicts=tuple(filter(None, sentences))))
        names = [entry.name for entry in entries]
        used = {name for conflict in conflicts for name in (*conflict.names(), *conflict.after)}
        for kind, unknown in (
            ("groups", {entry.group for entry in entries} - content["groups"].keys()),
            ("fields in conflicts", used - set(names)),
            ("fields that occur twice", {name for name in names if names.count(name) > 1}),
        ):
            if unknown:
                sys.exit(f"{source}: unexpected {kind}: {', '.join(sorted(unknown))}")
        rest = {"source": source, "groups": content["groups"], "fields": tuple(entries)}
        return build(cls, f"{source}: class", content["class"], conflicts=conflicts, **rest)

    @property
    def filters(self) -> list[str]:
        """The names of the filters, in the order in which they apply."""
        return [entry.name for entry in self.fields if entry.filter]

    def grouped(self) -> list[tuple[str, list[Field]]]:
        """The titles of the groups, each with its fields."""
        return [
            (title, [entry for entry in self.fields if entry.group == name])
            for name, title in self.groups.items()
        ]

    def description(self) -> str:
        """The documentation of the class. In `doc`, `{filters}` stands for the names of the filters."""
        parts = [self.summary, self.doc.strip().replace("{filters}", listed(self.filters))]
        for title, entries in self.grouped():
            parts += [f"{title}:", "\n".join(entry.bullet() for entry in entries)]
        return paragraphs(*parts)

    def signature(self) -> str:
        """The first lines of the docstring, from which `inspect` reads the signature."""
        defaults = ", ".join(f"{entry.name}={entry.python_default}" for entry in self.fields)
        return f"{self.name}(*, {defaults})\n--\n\n"
