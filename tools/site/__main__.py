"""Builds the pages of the documentation as a site: `make docs`.

    python tools/site [--out target/site]

The pages are those of the repository, which are read there, too: `README.md` is the first page, `docs/` is
the root, and a file elsewhere to which a page links, such as an example, becomes a page with its text. The
reference is made from the docstrings. `zensical.toml` has the order of the pages.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pages

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "site", help="folder of the site")
    out = parser.parse_args().out.resolve()
    folder = ROOT / "target" / "site-build"
    shutil.rmtree(folder, ignore_errors=True)
    pages.write_all(ROOT, folder / "pages")
    # Zensical has the folders of a site, and the sources of the reference, below that of its configuration.
    shutil.copy(ROOT / "zensical.toml", folder)
    (folder / "python").symlink_to(ROOT / "python")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=folder, check=False)
    if done.returncode == 0:
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(folder / "site", out)
        print(f"the site is in {out}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
