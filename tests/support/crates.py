"""The modules of a crate and their uses of each other, read from its sources."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: The path of a module: the names from the root of its crate on.
Module = tuple[str, ...]

TESTS = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*mod\s+\w+\s*\{")
USE = re.compile(r"(pub(?:\s*\([^)]*\))?\s+)?use\s+([^;]+);")
#: Paths in code; those of `use` are read as trees.
INLINE = re.compile(r"\b((?:crate|super|self)(?:::\w+)+)")
ROOTS = ("crate", "self", "super")


def code_of(source: Path) -> str:
    """The Rust code without its comments and strings."""
    pattern = r'//[^\n]*|/\*.*?\*/|r(#*)".*?"\1|"(?:\\.|[^"\\])*"'
    return re.sub(pattern, '""', source.read_text(), flags=re.DOTALL)


def without_tests(code: str) -> str:
    """The code without its modules of unit tests."""
    while found := TESTS.search(code):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(code[end], 0)
            end += 1
        code = code[: found.start()] + code[end:]
    return code


def branches(tree: str) -> Iterator[str]:
    """The parts of a list in braces, which can have lists themselves."""
    depth, start = 0, 0
    for index, character in enumerate(tree):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield tree[start:index]
            start = index + 1
    yield tree[start:]


def paths_of(tree: str, before: Module = ()) -> Iterator[Module]:
    """The paths of a `use`."""
    head, brace, rest = tree.strip().partition("{")
    names = [name.split(" as ")[0].strip() for name in head.split("::")]
    path = before + tuple(name for name in names if name)
    if not brace:
        yield path
        return
    for branch in branches(rest.rpartition("}")[0]):
        if branch.strip():
            yield from paths_of(branch, path)


class Crate:
    """The modules of a crate, and what each uses."""

    def __init__(self, name: str) -> None:
        folder = ROOT / "rust" / name / "src"
        self.uses: dict[Module, list[Module]] = {}
        #: By module: the paths of the names that it re-exports.
        self._exports: dict[Module, dict[str, Module]] = {}
        codes = {}
        for source in folder.rglob("*.rs"):
            parts = source.relative_to(folder).with_suffix("").parts
            module = parts[:-1] if parts[-1] in ("mod", "lib") else parts
            codes[module] = without_tests(code_of(source))
        self.uses = {module: [] for module in codes}
        self._exports = {module: {} for module in codes}
        for module, code in codes.items():
            self._read(module, code)

    def _read(self, module: Module, code: str) -> None:
        for public, tree in USE.findall(code):
            for found in paths_of(tree):
                path = self._absolute(module, found)
                if path and public:
                    self._exports[module][path[-1]] = path
                # A module may re-export what its own modules have.
                if path and not (public and path[: len(module)] == module):
                    self.uses[module].append(path)
        for found in INLINE.findall(USE.sub("", code)):
            if path := self._absolute(module, tuple(found.split("::"))):
                self.uses[module].append(path)

    def _absolute(self, module: Module, path: Module) -> Module | None:
        """The path from the root of the crate; None for those of other crates."""
        if path[0] not in ROOTS:
            return module + path if module + path[:1] in self.uses else None
        base: Module = () if path[0] == "crate" else module
        while path and path[0] in ROOTS:
            base = base[:-1] if path[0] == "super" else base
            path = path[1:]
        return base + path

    def _module_of(self, path: Module) -> Module:
        """The module that defines what a path names."""
        module = next(path[:end] for end in range(len(path), -1, -1) if path[:end] in self.uses)
        rest = path[len(module) :]
        exported = self._exports[module].get(rest[0]) if rest else None
        return module if exported in (None, path) else self._module_of((*exported, *rest[1:]))

    def graph(self) -> dict[Module, set[Module]]:
        """By module: the modules that it uses, without those that it is part of."""
        used = {module: {self._module_of(path) for path in paths} for module, paths in self.uses.items()}
        return {
            module: {other for other in others if module[: len(other)] != other}
            for module, others in used.items()
        }
