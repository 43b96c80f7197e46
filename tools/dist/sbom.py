"""Removes paths of the machine from the SBOM that maturin adds to a wheel.

The SBOM, `sboms/penstock-python.cyclonedx.json` in the CycloneDX format, lists the crates that the extension
module is compiled from. It names Penstock's by absolute paths, which differ between machines.
"""

from __future__ import annotations

from pathlib import Path

from archive import rewrite

#: The folder that replaces that of the sources.
NAME = b"file:///penstock"


def remove_paths(wheel: Path, sources: Path) -> None:
    """Rewrite a wheel without the folder of the sources that it was built from."""
    folder = sources.as_uri().encode()

    def edit(name: str, content: bytes) -> tuple[str, bytes]:
        return name, content.replace(folder, NAME) if ".dist-info/sboms/" in name else content

    rewrite(wheel, wheel, edit)
