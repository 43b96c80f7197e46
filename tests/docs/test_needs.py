"""Tests have the marks of what they need of the system, as far as their source tells it."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import needs
from support.paths import ROOT, TESTS

if TYPE_CHECKING:
    from collections.abc import Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign

FILES = sorted(path for path in TESTS.glob("*/test_*.py") if path != Path(__file__))
SIGNS = {name: re.compile(need.sign) for name, need in needs.NEEDS.items()}
#: Modules, and names of `os` and `signal`, that Python does not have on every system.
UNIX_MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "uvloop"}
UNIX_NAMES = {"fork", "geteuid", "getuid", "killpg", "mkfifo", "sched_yield"} | {
    "SIGALRM",
    "SIGHUP",
    "SIGKILL",
}


@dataclass
class Source:
    """A module of the tests: the code of its definitions, and where it has imported names from."""

    lines: list[str]
    tree: ast.Module
    definitions: dict[str, Definition] = field(default_factory=dict)
    imports: dict[str, tuple[Path, str]] = field(default_factory=dict)
    autouse: list[str] = field(default_factory=list)

    def code(self, node: Definition) -> str:
        """The lines of a definition with its decorators, without docstrings."""
        first = min([node.lineno, *(line.lineno for line in getattr(node, "decorator_list", []))])
        assert node.end_lineno is not None
        numbers = set(range(first, node.end_lineno + 1)).difference(*map(docstring_lines, ast.walk(node)))
        return "\n".join(self.lines[number - 1] for number in sorted(numbers))


def docstring_lines(node: ast.AST) -> range:
    """The lines of the docstring of a class or function."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not ast.get_docstring(
        node
    ):
        return range(0)
    first = node.body[0]
    assert first.end_lineno is not None
    return range(first.lineno, first.end_lineno + 1)


def module_file(name: str) -> Path | None:
    """The file of a module of the tests."""
    path = TESTS.joinpath(*name.split(".")).with_suffix(".py")
    return path if path.exists() else None


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements that run; those for types only do not."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        yield statement
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, ast.stmt):
                yield from statements([part])


@functools.cache
def source_of(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    source = Source(text.splitlines(), ast.parse(text))
    for statement in source.tree.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                source.definitions[statement.name] = statement
                if any("autouse=True" in ast.unparse(mark) for mark in statement.decorator_list):
                    source.autouse.append(statement.name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                source.definitions[name] = statement
    for statement in statements(source.tree.body):
        if not isinstance(statement, ast.ImportFrom) or statement.module is None:
            continue
        for alias in statement.names:
            name = alias.asname or alias.name
            if file := module_file(f"{statement.module}.{alias.name}"):
                source.imports[name] = (file, "")
            elif file := module_file(statement.module):
                source.imports[name] = (file, alias.name)
    return source


def used(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names in a definition, with an attribute of each; the arguments are fixtures of these names."""
    for part in ast.walk(node):
        match part:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                yield name, attribute
            case ast.Name(id=name) | ast.arg(arg=name):
                yield name, ""
            case ast.Call(func=ast.Attribute(attr="usefixtures"), args=arguments):
                yield from (
                    (str(argument.value), "") for argument in arguments if isinstance(argument, ast.Constant)
                )


@functools.cache
def direct(path: Path, name: str) -> frozenset[tuple[Path, str]]:
    """The definitions of the tests that a definition names."""
    source, found = source_of(path), set()
    for other, attribute in used(source.definitions[name]):
        if other in source.imports:
            target, inner = source.imports[other]
            found.add((target, inner or attribute))
        elif other in source.definitions:
            found.add((path, other))
        elif path.parent.parent == TESTS:
            found |= {(folder / "conftest.py", other) for folder in (path.parent, TESTS)}
    return frozenset(
        place for place in found if place[0].exists() and place[1] in source_of(place[0]).definitions
    )


@functools.cache
def needs_in(path: Path, name: str) -> tuple[frozenset[str], frozenset[str]]:
    """The needs of which a definition has signs, and those of the marks in it."""
    if path.parent.name == "emu" and not path.name.startswith("test_"):
        return frozenset(["cuda"]), frozenset()
    source = source_of(path)
    node = source.definitions[name]
    code = source.code(node)
    return frozenset(need for need, sign in SIGNS.items() if sign.search(code)), frozenset(marked(node))


def reachable(path: Path, names: list[str]) -> set[tuple[Path, str]]:
    """The definitions that these use, with themselves."""
    found: set[tuple[Path, str]] = set()
    pending = [(path, name) for name in names]
    while pending:
        place = pending.pop()
        if place not in found:
            found.add(place)
            if needs_in(*place)[0] != {"cuda"}:
                pending.extend(direct(*place))
    return found


def marked(node: ast.AST) -> set[str]:
    """The needs of the marks in a piece of code."""
    return {
        str(argument.value)
        for part in ast.walk(node)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "needs"
        for argument in part.args
        if isinstance(argument, ast.Constant)
    }


def missing_marks(path: Path) -> dict[str, list[str]]:
    """The needs of each test of a file for which it has no mark."""
    source = source_of(path)
    missing = {}
    of_file = set(needs.needs_of_file(path))
    if "pytestmark" in source.definitions:
        of_file |= marked(source.definitions["pytestmark"])
    for name in source.definitions:
        if not name.startswith("test_"):
            continue
        places = [needs_in(*place) for place in reachable(path, [name, *source.autouse])]
        found = set().union(*(signs for signs, _ in places))
        known = of_file.union(*(marks for _, marks in places))
        known |= {"cuda"} if "emulator" in known else set()
        if found - known:
            missing[name] = sorted(found - known)
    return missing


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_tests_have_marks_of_what_they_need(path: Path) -> None:
    assert missing_marks(path) == {}


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The code that runs when a module is imported: not the bodies of functions."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = [*node.decorator_list, *node.args.defaults]
    else:
        children = [] if isinstance(node, ast.Lambda) else list(ast.iter_child_nodes(node))
    for child in children:
        yield from at_import(child)


def test_files_can_be_imported_on_every_system() -> None:
    found = []
    files = [*TESTS.glob("*.py"), *TESTS.glob("*/*.py"), *TESTS.glob("support/*/*.py")]
    for path in files:
        if path.parent.name == "runtime" or path.name == "typing_user_code.py":
            continue
        for node in at_import(source_of(path).tree):
            match node:
                case ast.Import(names=names):
                    lacking = UNIX_MODULES & {alias.name for alias in names}
                case ast.ImportFrom(module=module):
                    lacking = UNIX_MODULES & {module}
                case ast.Attribute(value=ast.Name(id="os" | "signal"), attr=name):
                    lacking = UNIX_NAMES & {name}
                case _:
                    continue
            found += [f"{path.relative_to(TESTS)}:{node.lineno}: {name}" for name in lacking]
    assert len(files) > 200
    assert found == []


SAMPLE = """
import os
import pytest

@pytest.mark.needs("fork")
def test_fork():
    assert os.fork

@pytest.mark.needs("hooks", "sources")
def test_hooks():
    pass

def test_plain():
    pass

@pytest.mark.parametrize("kind", ["file", pytest.param("link", marks=pytest.mark.needs("symlinks"))])
def test_kinds(kind):
    pass
"""


def run(folder: Path, *options: str) -> str:
    """The output of pytest with the tests of a folder and the plugin alone."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.needs",
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(TESTS)])}
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    needs(name): a need\n")
    done = subprocess.run(
        [*command, "test_sample.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("without", "counts", "reasons"),
    [
        ([], "5 passed", []),
        (["fork"], "4 passed, 1 skipped", ["needs fork: os.fork"]),
        (
            ["sources", "symlinks"],
            "3 passed, 2 skipped",
            ["needs sources: ", "needs symlinks: symbolic links"],
        ),
    ],
    ids=["nothing", "fork", "two"],
)
def test_missing_need_skips_with_its_name(
    without: list[str], counts: str, reasons: list[str], tmp_path: Path
) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    output = run(tmp_path, *(option for name in without for option in ("--without", name)))
    assert f"{counts} in" in output
    assert [reason for reason in reasons if reason not in output] == []


def test_unknown_need_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE.replace('"fork"', '"spoon"'))
    assert "unknown needs: [('spoon', 'test_sample.py::test_fork')]" in run(tmp_path, "--collect-only")


def test_file_whose_needs_are_missing_is_not_imported() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--without", "emulator"]
    done = subprocess.run(
        [*command, "emu/test_emu_checks.py"], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert "needs emulator" in done.stdout
    assert "1 skipped" in done.stdout


def test_sign_without_a_mark_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_sample.py"
    path.write_text(
        'import os\n\ndef helper():\n    os.fork()\n\ndef test_child():\n    """/proc/"""\n    helper()\n'
    )
    assert missing_marks(path) == {"test_child": ["fork"]}
