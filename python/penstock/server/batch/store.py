"""The files of a client and the records of its batches, in a folder of its own.

A file is published with its description, so a server that is killed leaves no description of an incomplete
file. The names of files on the disk are ids that the server makes; no request names a path.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.server.errors import ApiError
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from penstock.server.batch.lines import Answer, Problem
    from penstock.server.settings import ServerSettings

__all__ = ["Batch", "Folder", "new_file_id"]

_FILE, _BATCH = "file-", "batch_"
_DESCRIPTION = ".json"
_UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def new_file_id() -> str:
    """An id that no file has."""
    return _FILE + secrets.token_hex(16)


class Batch(msgspec.Struct):
    """A batch as it is on the disk."""

    #: The object of OpenAI's API.
    fields: dict[str, Any]
    #: The ids of its files, also of those that are not published.
    output_id: str
    error_id: str
    #: Bytes of the longest line of its input, once it has been checked.
    longest: int = 1

    @property
    def id(self) -> str:
        """The id of the batch."""
        name: str = self.fields["id"]
        return name

    @property
    def status(self) -> str:
        """The status in OpenAI's API."""
        name: str = self.fields["status"]
        return name

    @property
    def is_unfinished(self) -> bool:
        """Whether there is something left to do."""
        return self.status in _UNFINISHED

    def file_of(self, answer: Answer) -> str:
        """The id of the file that has the line of a request."""
        return self.output_id if answer.is_ok else self.error_id

    def fail(self, problems: Iterable[Problem]) -> None:
        """Note the errors because of which the batch has failed."""
        data = [problem._asdict() for problem in problems]
        self.fields["errors"] = {"object": "list", "data": data}

    def set_status(self, status: str) -> None:
        """Change the status, and note the time."""
        self.fields |= {"status": status, f"{status}_at": int(time.time())}


class Folder:
    """The files and the batches of one client, by id, in the order in which they were made."""

    def __init__(self, path: Path, settings: ServerSettings) -> None:
        """Read the folder. Files of uploads that have not ended are removed."""
        self._path = path
        self._settings = settings
        path.mkdir(mode=0o700, exist_ok=True)
        self.files: dict[str, dict[str, Any]] = {}
        self.batches: dict[str, Batch] = {}
        #: The number of tasks that write the record of a batch. Until they have ended, it is not removed.
        self._num_saving: Counter[str] = Counter()
        for found in path.glob(f"{_BATCH}*{_DESCRIPTION}"):
            self.batches[found.stem] = msgspec.json.decode(found.read_bytes(), type=Batch)
        for found in path.glob(f"{_FILE}*{_DESCRIPTION}"):
            self.files[found.stem] = msgspec.json.decode(found.read_bytes())
        self.files = dict(sorted(self.files.items(), key=lambda item: item[1]["created_at"]))
        self.batches = dict(sorted(self.batches.items(), key=lambda item: item[1].fields["created_at"]))
        unfinished = [batch for batch in self.batches.values() if batch.is_unfinished]
        used = {name for batch in unfinished for name in (batch.output_id, batch.error_id)}
        #: Bytes of each file, also of those that are not published.
        self._sizes: dict[str, int] = {}
        for found in path.glob(f"{_FILE}*"):
            if found.name in self.files or found.name in used:
                self._sizes[found.name] = found.stat().st_size
            elif found.suffix != _DESCRIPTION:
                found.unlink()

    def path_of(self, file_id: str) -> Path:
        """The path of a file with an id of the server."""
        return self._path / file_id

    def attempts_path(self, batch: Batch) -> Path:
        """The path of the file about the requests of a batch that run."""
        return self._path / f"{batch.id}.attempts"

    def check_room(self, param: str = "file") -> None:
        """Raise if the client has as many files as it may have."""
        if len(self.files) >= (limit := self._settings.max_files):
            raise ApiError(400, f"you have {limit} files, which is the limit: delete some", param=param)

    def take_bytes(self, file_id: str, size: int) -> None:
        """Count bytes before they are written to a file. Raises if there is no room for them."""
        limit = self._settings.max_total_file_bytes
        if sum(self._sizes.values()) + size > limit:
            message = f"your files are too large: the limit is {limit} bytes for all; delete some"
            raise ApiError(400, message, param="file", code="storage_limit_exceeded")
        self._sizes[file_id] = self._sizes.get(file_id, 0) + size

    def publish(self, file_id: str, filename: str, purpose: str) -> dict[str, Any]:
        """Describe a file that has been written; returns the object of OpenAI's API."""
        with self.path_of(file_id).open("rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        fields = {
            "id": file_id,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "expires_at": None,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        self._write(file_id, fields)
        self.files[file_id] = fields
        return fields

    def remove(self, file_id: str) -> None:
        """Remove a file, published or not."""
        self.files.pop(file_id, None)
        self.path_of(file_id + _DESCRIPTION).unlink(missing_ok=True)
        self.path_of(file_id).unlink(missing_ok=True)
        self._sizes.pop(file_id, None)

    def add(self, fields: dict[str, Any]) -> Batch:
        """A new batch. The oldest one that has ended makes room; raises if none has, or for its files."""
        self.check_room("input_file_id")
        if len(self.batches) >= (limit := self._settings.max_files):
            ended = (found for found in self.batches.values() if not found.is_unfinished)
            oldest = next((found for found in ended if not self._num_saving[found.id]), None)
            if oldest is None:
                raise ApiError(429, f"you have {limit} unfinished batches, which is the limit")
            del self.batches[oldest.id]
            self.path_of(oldest.id + _DESCRIPTION).unlink(missing_ok=True)
        fields = {"id": _BATCH + secrets.token_hex(16), **fields}
        batch = self.batches[fields["id"]] = Batch(fields, new_file_id(), new_file_id())
        return batch

    def next_batch(self) -> Batch | None:
        """The first batch that is to run."""
        found = (batch for batch in self.batches.values() if batch.is_unfinished)
        return next((batch for batch in found if batch.status != "cancelling"), None)

    def publish_results(self, batch: Batch) -> None:
        """Publish the files of a batch that have lines."""
        for kind, file_id in (("output", batch.output_id), ("error", batch.error_id)):
            path = self.path_of(file_id)
            if path.exists() and path.stat().st_size:
                self.publish(file_id, f"{batch.id}_{kind}.jsonl", "batch_output")
                batch.fields[f"{kind}_file_id"] = file_id
            else:
                self.remove(file_id)
        self.attempts_path(batch).unlink(missing_ok=True)

    @contextmanager
    def saving(self, batch: Batch) -> Iterator[None]:
        """A time in which the record of a batch is written, and so not removed."""
        self._num_saving[batch.id] += 1
        try:
            yield
        finally:
            self._num_saving[batch.id] -= 1
            self._num_saving += Counter()  # without those that are 0

    def save(self, batch: Batch) -> None:
        """Write the record of a batch to the disk."""
        self._write(batch.id, batch)

    def _write(self, name: str, value: object) -> None:
        """Write a description, so that a process that is killed leaves the former one or this one."""
        path = self.path_of(name + _DESCRIPTION)
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(json_bytes(value))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
