"""`/v1/files` and `/v1/batches`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

__all__ = ["BatchRequest", "FileRequest"]


class FileRequest(msgspec.Struct):
    """The fields of a form with a file."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]


class BatchRequest(msgspec.Struct):
    """A batch of the requests in a file."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, msgspec.Meta(max_length=64)],
                Annotated[str, msgspec.Meta(max_length=512)],
            ],
            msgspec.Meta(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: Any = None
