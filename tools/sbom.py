"""Removes the folder of the checkout from the SBOM that maturin adds to a wheel.

    python tools/sbom.py WHEEL ...

The SBOM, `sboms/penstock-python.cyclonedx.json` in the CycloneDX format, lists the crates that the extension
module is compiled from. It names those of the checkout by absolute paths. Without these, two machines build
equal wheels.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The folder that replaces that of the checkout.
NAME = b"file:///penstock"


def record_with(record: bytes, changed: dict[str, bytes]) -> bytes:
    """The list of the files of a wheel, with the hashes and sizes of changed ones."""
    rows = list(csv.reader(io.StringIO(record.decode())))
    for row in rows:
        if row[0] in changed:
            data = changed[row[0]]
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            row[1:] = [f"sha256={digest}", str(len(data))]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def remove_paths(wheel: Path, root: Path = ROOT) -> None:
    """Rewrite a wheel, if its SBOM has paths in the folder."""
    with zipfile.ZipFile(wheel) as archive:
        files = [(info, archive.read(info)) for info in archive.infolist()]
    changed = {
        info.filename: data.replace(root.as_uri().encode(), NAME)
        for info, data in files
        if ".dist-info/sboms/" in info.filename and root.as_uri().encode() in data
    }
    if not changed:
        return
    part = wheel.with_suffix(".part")
    with zipfile.ZipFile(part, "w") as archive:
        for info, data in files:
            contents = changed.get(info.filename, data)
            if info.filename.endswith(".dist-info/RECORD"):
                contents = record_with(data, changed)
            archive.writestr(info, contents)
    part.replace(wheel)


def main() -> None:
    """Rewrite the wheels of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    for wheel in parser.parse_args().wheels:
        remove_paths(wheel)


if __name__ == "__main__":
    main()
