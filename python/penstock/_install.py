"""The distribution of this package, and the commands that install its extras.

`importlib.metadata` would take a third of the time of `import penstock`: it is imported when it is needed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["DISTRIBUTION", "install_command", "missing_extra", "warn_of_namesake"]

#: The name on PyPI, where `penstock` is another project.
DISTRIBUTION = "penstock-llm"


def install_command(extra: str) -> str:
    """The command that installs an extra for this copy of the package, which may be a checkout."""
    if _is_installed(DISTRIBUTION):
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install '{Path(__file__).parents[2]}[{extra}]'"


def missing_extra(user: str, library: str | None, extra: str) -> str:
    """The message for a library that is not installed: `user` needs it, and the extra installs it."""
    library = (library or "").partition(".")[0]
    return f'{user} needs {library}: install the extra "{extra}" of {DISTRIBUTION}: {install_command(extra)}'


def warn_of_namesake() -> None:
    """Warn if the distribution `penstock` of PyPI is installed: its files replace those of this package."""
    if _has_namesake():
        warnings.warn(
            "the distribution penstock is installed, another project with a package of the same name; "
            f"remove it, and install {DISTRIBUTION} again: "
            f"pip uninstall penstock && pip install --force-reinstall {shlex.quote(_origin())}",
            RuntimeWarning,
            stacklevel=3,
        )


def _has_namesake() -> bool:
    for folder in sys.path:
        with suppress(OSError, TypeError):  # also of bytes in the path
            names = os.listdir(folder or os.curdir)  # noqa: PTH208 - faster
            if any(name.startswith("penstock-") and name.endswith(".dist-info") for name in names):
                return True
    return False


def _origin() -> str:
    """The place that this copy was installed from, for pip: a path, an address, or the name on the index."""
    if not _is_installed(DISTRIBUTION):
        return str(Path(__file__).parents[2])
    from importlib import metadata

    origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    if origin is None:
        return DISTRIBUTION
    fields = json.loads(origin)
    url: str = fields["url"]
    parts = urlsplit(url)
    if parts.scheme == "file":
        return unquote(parts.path)
    return f"{fields['vcs_info']['vcs']}+{url}" if "vcs_info" in fields else url


def _is_installed(distribution: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
