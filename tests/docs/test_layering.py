"""The architecture's rules: dependencies between crates, and code that must not appear in some places."""

from __future__ import annotations

import ast
import re
import tomllib
from typing import TYPE_CHECKING

import pytest

import penstock
from support.crates import code_of
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

RUST = ROOT / "rust"
PACKAGE = ROOT / "python" / "penstock"

# The workspace crates that each crate's library and build script depend on.
LAYERS = {
    "types": set(),
    "kernels": {"types"},
    "checkpoint": {"types"},
    "cuda": set(),
    "engine": {"types"},
    "guidance": set(),
    "device": {"types", "kernels", "cuda"},
    "models": {"types", "device", "checkpoint"},
    "text": {"types", "checkpoint"},
    "runner": {"types", "device", "cuda", "models", "checkpoint", "engine"},
    "frontend": {"types", "engine", "text", "guidance"},
    "python": {"types", "frontend", "runner", "engine", "text", "checkpoint"},
}

# The only places with unsafe code.
MAY_BE_UNSAFE = (
    "kernels/src/",
    "cuda/src/",
    "device/src/cuda/",
    "device/src/system/",
    "engine/src/result_queue",
    "engine/src/port",
    "engine/src/process.rs",
    "checkpoint/src/mapped.rs",
    "python/src/deep_call.rs",
    "python/src/tensor/",
    "runner/src/cpu_time.rs",
)

HEAVY = {"torch", "numpy", "transformers", "huggingface_hub", "jinja2", "tqdm"}


def manifest(crate: str) -> dict[str, dict[str, object]]:
    return tomllib.loads((RUST / crate / "Cargo.toml").read_text())


KINDS = ("dependencies", "build-dependencies", "dev-dependencies")


def dependencies(crate: str, kinds: tuple[str, ...] = KINDS) -> set[str]:
    tables = [manifest(crate), *manifest(crate).get("target", {}).values()]
    return {name for table in tables for kind in kinds for name in table.get(kind, {})}  # type: ignore[attr-defined]


def ours(names: set[str]) -> set[str]:
    return {name.removeprefix("penstock-") for name in names if name.startswith("penstock-")}


def test_every_crate_is_in_the_layering() -> None:
    assert {folder.parent.name for folder in RUST.glob("*/Cargo.toml")} == LAYERS.keys()


@pytest.mark.parametrize("crate", LAYERS)
def test_crate_depends_only_on_its_listed_layers(crate: str) -> None:
    assert ours(dependencies(crate, KINDS[:2])) == LAYERS[crate]


@pytest.mark.parametrize("crate", LAYERS)
def test_dev_dependencies_reach_no_layer_above_their_crate(crate: str) -> None:
    below = set(LAYERS[crate])
    while more := {deeper for layer in below for deeper in LAYERS[layer]} - below:
        below |= more
    # A crate may depend on itself to enable its feature `testing` in its own tests.
    assert ours(dependencies(crate)) - {crate} <= below


@pytest.mark.parametrize("crate", LAYERS)
def test_feature_testing_is_enabled_only_by_dev_dependencies(crate: str) -> None:
    tables = [manifest(crate), *manifest(crate).get("target", {}).values()]
    specs = [spec for table in tables for kind in KINDS[:2] for spec in table.get(kind, {}).values()]  # type: ignore[attr-defined]
    assert not any("testing" in spec.get("features", ()) for spec in specs if isinstance(spec, dict))
    assert "testing" not in manifest(crate).get("features", {}).get("default", [])  # type: ignore[operator]


def test_cpu_backend_and_kernels_are_named_in_listed_files() -> None:
    def users(module: str) -> set[str]:
        sources = RUST.glob("*/src/**/*.rs")
        return {str(source.relative_to(RUST)) for source in sources if module in code_of(source)}

    assert users("penstock_device::cpu") == {"runner/src/backend.rs"}
    kernels = users("penstock_kernels")
    assert kernels
    # The CUDA backend chooses codes as the CPU does, and reads matrices that were packed for the CPU.
    allowed = ("device/src/cpu/", "device/src/cuda/", "device/src/packed.rs", "kernels/")
    assert all(source.startswith(allowed) for source in kernels)


def test_only_the_python_crate_depends_on_pyo3() -> None:
    assert [crate for crate in LAYERS if "pyo3" in dependencies(crate)] == ["python"]


def test_environment_is_read_in_one_place() -> None:
    """A Python program may change it at any time, so the reader is attached to the interpreter."""
    readers = {
        source.relative_to(RUST).as_posix()
        for source in RUST.glob("*/src/**/*.rs")
        if re.search(r"\benv::vars?(_os)?\b|\bgetenv\b", code_of(source))
    }
    assert readers == {"runner/src/environment.rs"}


def test_unsafe_code_is_only_in_listed_places() -> None:
    unsafe = {
        source.relative_to(RUST).as_posix()
        for source in RUST.glob("*/src/**/*.rs")
        if re.search(r"\bunsafe\b", code_of(source))
    }
    assert {source for source in unsafe if not source.startswith(MAY_BE_UNSAFE)} == set()
    assert any(source.startswith("kernels/src/") for source in unsafe), (
        "the search finds no unsafe code at all"
    )


def test_no_token_is_delivered_by_an_event_loop_callback() -> None:
    for source in PACKAGE.rglob("*.py"):
        assert "call_soon_threadsafe" not in source.read_text(), source
    for source in RUST.rglob("*.rs"):
        assert "future_into_py" not in code_of(source), source


def test_no_module_imports_a_heavy_library_at_import_time() -> None:
    for source in PACKAGE.rglob("*.py"):
        for node in ast.parse(source.read_text()).body:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not HEAVY & {name.partition(".")[0] for name in names}, f"{source}:{node.lineno}"


def modules() -> dict[str, Path]:
    """The modules of the package by name; the stub stands for the extension module."""
    sources = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
    parts = {source: source.relative_to(PACKAGE.parent).with_suffix("").parts for source in sources}
    return {".".join(part for part in parts[source] if part != "__init__"): source for source in sources}


def imports(text: str, known: Collection[str]) -> set[str]:
    """The known modules that a source imports anywhere: at its head, for type checkers and in functions.

    A package whose names are imported counts as a module: its `__init__`.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if names <= {*known} else {node.module or "", *names}
    return found & set(known)


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of several modules."""
    reached = {module: reach(module, graph) for module in graph}
    found = {
        frozenset(other for other in others if module in reached[other])
        for module, others in reached.items()
        if module in others
    }
    return sorted(map(sorted, found))


def reach(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    new = {module}
    while new := {other for each in new for other in graph[each]} - found:
        found |= new
    return found


def test_imports_are_found_at_every_place() -> None:
    known = {"p", "p.a", "p.b", "p.c", "p.d", "p.e"}
    text = "import p.a\nfrom p import b, x\ndef f():\n    from p.c import y\nif TYPE_CHECKING:\n import p.d"
    assert imports(text, known) == {"p", "p.a", "p.b", "p.c", "p.d"}
    graph = {"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]


def test_modules_import_each_other_in_no_circle() -> None:
    """A facade may import `penstock`, because `penstock/__init__` does not import the facade."""
    found = modules()
    graph = {name: imports(source.read_text(), found) - {name} for name, source in found.items()}
    assert graph["penstock"] >= {"penstock.engine", "penstock._core"}
    shown = [
        "\n".join(f"{name} -> {', '.join(sorted(graph[name] & {*circle}))}" for name in circle)
        for circle in circles(graph)
    ]
    assert not shown, "these modules import each other:\n" + "\n\n".join(shown)


def test_modules_import_no_package_around_them() -> None:
    """Some packages import their modules by name when a name is used, which is no statement of import."""
    found = modules()
    for name, source in found.items():
        packages = {other for other in imports(source.read_text(), found) if name.startswith(f"{other}.")}
        assert packages <= {"penstock"}, name


#: Modules of the server that know no engine, which the runtime shares.
SHARED = {
    f"penstock.server.{name}"
    for name in (
        *("connection", "disconnects", "errors", "families", "heads", "hosts", "keys"),
        *("listener", "logs", "measures", "paths", "settings"),
    )
}


#: Modules that import nothing of the package.
LEAVES = {
    "penstock._chat_sampling",
    "penstock._client",
    "penstock._hub_ids",
    "penstock._hub_messages",
    "penstock._install",
    "penstock._json",
    "penstock._renderer",
    "penstock._shown",
    "penstock._system",
    "penstock._threads",
}


def test_leaves_import_nothing_of_the_package() -> None:
    for name in LEAVES:
        nodes = list(ast.walk(ast.parse((PACKAGE / f"{name.partition('.')[2]}.py").read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not any(module.partition(".")[0] == "penstock" for module in imported)


def test_one_module_knows_the_form_of_hub_ids() -> None:
    users = {source.name for source in PACKAGE.rglob("*.py") if r"/\w[\w.-]" in source.read_text()}
    assert users == {"_hub_ids.py"}


@pytest.mark.parametrize("folder", ["bench", "compat", "runtime", "server"])
def test_compatibility_modules_use_only_public_names(folder: str) -> None:
    allowed = LEAVES | SHARED if folder == "runtime" else LEAVES
    for source in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            used: set[str] = set()
            if isinstance(node, ast.Import):
                modules = {alias.name for alias in node.names}
                used = {name for name in modules if name.startswith("penstock.")}
            elif isinstance(node, ast.ImportFrom) and node.module == "penstock":
                used = {alias.name for alias in node.names} - set(penstock.__all__)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock."):
                used = {node.module or ""}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "penstock":
                used = {node.attr} - set(penstock.__all__)
            others = {name for name in used if not name.startswith(f"penstock.{folder}")} - allowed
            assert others == set(), f"{source}:{node.lineno}"  # type: ignore[attr-defined]
