"""The PyO3 classes: one macro call per class, with its docstrings."""

from __future__ import annotations

from definitions import Definition
from values import ValueClass, ValueField

from text import doc_literal, rust_string, wrapped


def rust_option_class(definition: Definition, parts: str, path: str) -> list[str]:
    """The class of options. `parts` are the fields of the Rust struct; `path` is that of the options."""
    doc = rust_string(definition.signature() + "\n".join(wrapped(definition.description())))
    lines = ["option_class! {", f'    Py{definition.name}, "{definition.name}", {parts}, {doc};']
    for entry in definition.fields:
        value = entry.binding or f"{path}.{entry.name}"
        lines.append(f"    {entry.name}: {value}, {doc_literal(entry.description())};")
    bindings = [entry.binding for entry in definition.fields if entry.binding]
    lines.append("    ;")
    if bindings:
        lines += [
            "    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {",
            *(f"        self.{binding}.traverse(&visit)?;" for binding in bindings),
            "        Ok(())",
            "    }",
            "",
            "    fn __clear__(&self) {",
            *(f"        self.{binding}.clear();" for binding in bindings),
            "    }",
        ]
    return [*lines, "}"]


def rust_value_class(item: ValueClass, classes: list[ValueClass]) -> list[str]:
    doc = rust_string(item.signature(classes) + "\n".join(wrapped(item.description())))
    beside = f" + {item.beside}" if item.beside else ""
    lines = ["value_class! {", f"    Py{item.rust} = {item.rust}{beside}, {rust_string(item.name)}, {doc};"]
    for entry in item.fields:
        default = f" = {rust_default(item, entry)}" if item.has_defaults else ""
        lines.append(f"    {entry.name}: {doc_literal(entry.description())}{default},")
    lines.append("    ;")
    values = [(entry, entry.value or f"self.0.{entry.name}()") for entry in item.properties]
    first = f"first(&self.0.{item.first_of})?"
    values += [(entry, f"{first}.{entry.name}") for entry in item.delegated(classes)]
    for entry, value in values:
        lines += [
            f"    #[doc = {doc_literal(entry.description())}]",
            "    #[getter]",
            f"    fn {entry.name}<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {{",
            f"        {value}.to_python(py)",
            "    }",
        ]
    lines += [
        f"    #[doc = {doc_literal(item.json_description())}]",
        "    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {",
        "        self.0.to_json(py)",
        "    }",
        "}",
    ]
    if not item.own_json:
        names = [entry.name for entry in item.fields if entry.is_json]
        names += [f"{entry.name}()" for entry in item.properties if entry.is_json]
        lines += ["", f"to_json! {{ {item.rust}: {', '.join(names)} }}"]
    return lines


def rust_default(item: ValueClass, entry: ValueField) -> str:
    """The closure that makes a value that the constructor is not given, from its other arguments."""
    if entry.name == item.first_of:
        return f"|keywords| Ok(vec![Py{item.first_class}::take(keywords)?.into()])"
    return f"|_| Ok({entry.default or 'Default::default()'})"


def rust_constructor(item: ValueClass) -> list[str]:
    """The struct of a value class with the expressions of its fields."""
    lines = [
        f"impl {item.rust} {{",
        "    pub fn new(",
        "        info: &penstock_runner::ModelInfo,",
        "        limits: &Limits,",
        "        generation: &GenerationConfig,",
        "        embedding: &EmbeddingConfig,",
        "    ) -> Self {",
        "        Self {",
    ]
    lines += [f"            {entry.name}: {entry.value}," for entry in item.fields]
    return [*lines, "        }", "    }", "}"]
