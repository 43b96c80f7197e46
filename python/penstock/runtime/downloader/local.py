"""Models in a local directory, or a single local file."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.downloader.errors import (
    AccessDeniedError,
    InvalidArgumentError,
    ModelNotFoundError,
    TransferError,
)
from penstock.runtime.downloader.files import RemoteFile
from penstock.runtime.downloader.names import is_state
from penstock.runtime.downloader.retries import FileChangedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.runtime.downloader.checksums import Checksum
    from penstock.runtime.downloader.options import Options
    from penstock.runtime.downloader.transport import Session

__all__ = ["LocalSource"]


class _LocalContent:
    """The content of a local file."""

    checksum: Checksum | None = None

    def __init__(self, path: str, start: int, stop: int | None) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._position, self._stop = start, stop
        self.start = start

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; none at the end."""
        if self._stop is not None:
            size = min(size, self._stop - self._position)
        data = os.pread(self._file, size, self._position)
        self._position += len(data)
        return data

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class LocalSource:
    """A directory or file of this machine. Links to files are followed, links to directories are not."""

    kind = "local"

    def __init__(self, path: str, options: Options) -> None:
        if not path:
            raise InvalidArgumentError("model_uri: a path is missing", "model_uri")
        self.path = Path(os.path.abspath(os.path.expanduser(path)))  # noqa: PTH100, PTH111 - never raises
        self.uri = str(self.path)
        self.model_name = self.path.name
        self.options = options

    def files(self, _session: Session) -> Iterator[RemoteFile]:
        """All files."""
        self._check(self.path)
        if self.path.is_file():
            yield self._describe(self.path, self.path.name)
            return
        if not self.path.is_dir():
            raise ModelNotFoundError(f"{self.path}: no such file or directory")
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = Path(folder) / name
                relative = path.relative_to(self.path).as_posix()
                if not is_state(relative):
                    yield self._describe(path, relative)

    def refresh(self, _session: Session, file: RemoteFile) -> RemoteFile:
        """The file as it is now."""
        return self._describe(Path(file.key), file.name)

    def open(self, _session: Session, file: RemoteFile, start: int, stop: int | None) -> _LocalContent:
        """A range of a file."""
        if self._describe(Path(file.key), file.name).version != file.version:
            raise FileChangedError(f"{file.key}: the file changed")
        return _LocalContent(file.key, start, stop)

    def _describe(self, path: Path, name: str) -> RemoteFile:
        self._check(path)
        try:
            facts = path.stat()
        except OSError as error:
            raise TransferError(f"{path}: {error.strerror}") from None
        if not stat.S_ISREG(facts.st_mode):
            raise TransferError(f"{path}: not a regular file")
        return RemoteFile(name, facts.st_size, f"{facts.st_size}-{facts.st_mtime_ns}", key=str(path))

    def _check(self, path: Path) -> None:
        roots = self.options.allowed_roots
        if roots is None:
            return
        real = path.resolve()
        if not any(real.is_relative_to(Path(root).resolve()) for root in roots):
            options = "DOWNLOADER_ALLOWED_ROOTS, or --allowed-root of the runtime"
            raise AccessDeniedError(f"{path}: not in an allowed directory ({options})")
