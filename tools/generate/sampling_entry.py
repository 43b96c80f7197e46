"""The entry of a batch that a CUDA device samples, for the kernels, the host and the tests of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from definitions import Definition, build, load, source_of

from text import rust_doc

SOURCE = "sampling_entry"
CUDA_TYPES = {"u64": "uint64_t", "u32": "uint32_t", "f32": "float"}
NUMPY_TYPES = {"u64": "np.uint64", "u32": "np.uint32", "f32": "np.float32"}


@dataclass(frozen=True)
class EntryField:
    """A number of an entry."""

    name: str
    type: str
    summary: str = ""
    sampling: bool = False


@dataclass(frozen=True)
class Flag:
    """A bit of `flags`."""

    name: str
    summary: str


@dataclass(frozen=True)
class SamplingEntry:
    """The definition of the entry."""

    name: str
    summary: str
    flags: tuple[Flag, ...]
    fields: tuple[EntryField, ...]

    @classmethod
    def load(cls, params: Definition) -> SamplingEntry:
        content, where = load(SOURCE), source_of(SOURCE)
        summaries = {entry.name: entry.summary for entry in params.fields if entry.sampling}
        for entry in content["field"]:
            if entry.get("sampling"):
                entry["summary"] = summaries[entry["name"]]
        flags = tuple(build(Flag, where, entry) for entry in content["flag"])
        fields = tuple(build(EntryField, where, entry) for entry in content["field"])
        if sum(field.type != "u64" for field in fields) % 2:
            fields += (EntryField("reserved", "u32", "0: without it the structure would have padding"),)
        return build(cls, where, content["class"], flags=flags, fields=fields)

    def bits(self) -> list[tuple[Flag, int]]:
        """The flags with their values."""
        return [(flag, 1 << index) for index, flag in enumerate(self.flags)]


def cuda_entry(entry: SamplingEntry) -> str:
    """The structure and the flags in CUDA C++."""
    lines = ["enum : uint32_t {"]
    for flag, value in entry.bits():
        lines += [f"    // {flag.summary}.", f"    {flag.name} = {value},"]
    lines += ["};", "", f"// {entry.summary}.", f"struct {entry.name} {{"]
    for field in entry.fields:
        lines += [f"    // {field.summary}.", f"    {CUDA_TYPES[field.type]} {field.name};"]
    return "\n".join([*lines, "};", ""])


def rust_entry(entry: SamplingEntry, notice: str) -> str:
    """The structure and the flags in Rust, and the entry that sampling parameters give."""
    lines = [
        f"//! The structure `{entry.name}` of `cuda/sample.cuh`. {notice}",
        "",
        "use bytemuck::{Pod, Zeroable};",
        "use penstock_types::Sampling;",
        "",
        "/// The bits of [`Entry::flags`].",
        "pub(super) mod flags {",
    ]
    for flag, value in entry.bits():
        lines += [f"    /// {flag.summary}.", f"    pub const {flag.name}: u32 = {value};"]
    lines += [
        "}",
        "",
        f"/// {entry.summary}.",
        "#[repr(C)]",
        "#[derive(Clone, Copy, Debug, Pod, Zeroable)]",
        f"pub(super) struct {entry.name} {{",
    ]
    for field in entry.fields:
        lines += [*rust_doc(f"{field.summary}.", "    "), f"    pub {field.name}: {field.type},"]
    lines += [
        "}",
        "",
        f"impl {entry.name} {{",
        "    /// An entry with these sampling parameters; its other fields are 0.",
        "    pub fn with_sampling(sampling: &Sampling) -> Self {",
        "        Self {",
    ]
    lines += [f"            {field.name}: sampling.{field.name}," for field in entry.fields if field.sampling]
    return "\n".join([*lines, "            ..Self::zeroed()", "        }", "    }", "}", ""])


def python_entry(entry: SamplingEntry) -> str:
    """The structure and the flags for NumPy."""
    lines = [f"{flag.name} = {value}" for flag, value in entry.bits()]
    lines += ["#: ``Entry`` of ``cuda/sample.cuh``.", "ENTRY = np.dtype(", "    ["]
    lines += [f'        ("{field.name}", {NUMPY_TYPES[field.type]}),' for field in entry.fields]
    return "\n".join([*lines, "    ],", "    align=True,", ")", ""])
