"""The wheels: systems, CPUs and versions of Python. As a program, it prints the targets of Rust."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The crate of the extension module.
CRATE = "penstock-python"


@dataclass(frozen=True)
class Wheel:
    """A wheel: the target of Rust, and its options for maturin."""

    target: str
    options: tuple[str, ...] = ("--zig",)
    python: str | None = None  # the stable ABI if it is not set

    @property
    def name(self) -> str:
        """The name on the command line."""
        return self.target if self.python is None else f"{self.target}-{self.python}"


GNU = ("--zig", "--compatibility", "manylinux_2_17")
MUSL = ("--zig", "--compatibility", "musllinux_1_2")
WHEELS = (
    Wheel("x86_64-unknown-linux-gnu", GNU),
    Wheel("aarch64-unknown-linux-gnu", GNU),
    Wheel("x86_64-unknown-linux-musl", MUSL),
    Wheel("aarch64-unknown-linux-musl", MUSL),
    Wheel("aarch64-apple-darwin"),
    Wheel("x86_64-apple-darwin"),
    Wheel("x86_64-pc-windows-gnu", ()),  # zig cannot link this package for Windows
    Wheel("x86_64-unknown-linux-gnu", GNU, "cp314t"),
    Wheel("aarch64-unknown-linux-gnu", GNU, "cp314t"),
)
TARGETS = tuple(dict.fromkeys(wheel.target for wheel in WHEELS))

if __name__ == "__main__":
    print(*TARGETS)
