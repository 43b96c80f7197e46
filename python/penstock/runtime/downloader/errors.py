"""All exceptions of the downloader. Their messages have no credentials.

DownloadError
├── InvalidArgumentError (ValueError)  the URI, an option or a credential is invalid or missing
├── ModelNotFoundError                 the model, bucket, revision or file does not exist
├── AccessDeniedError                  the server refuses the credentials, or a host or path is not allowed
├── UnsafeNameError                    a remote file's name does not fit below the target directory
├── ForeignFileError                   a folder or file of the target directory is that of another user
├── TooLargeError                      the model has more files or bytes than the limits allow
├── InsufficientSpaceError             the disk is full, or has too little free space
├── IntegrityError                     the bytes do not match the checksum, or the file keeps changing
├── TransferError                      the server or the network fails; a later attempt resumes
└── DownloadCancelledError             the caller cancelled
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "DownloadCancelledError",
    "DownloadError",
    "ForeignFileError",
    "InsufficientSpaceError",
    "IntegrityError",
    "InvalidArgumentError",
    "ModelNotFoundError",
    "TooLargeError",
    "TransferError",
    "UnsafeNameError",
]


class DownloadError(Exception):
    """Base class of the downloader's errors."""


class InvalidArgumentError(DownloadError, ValueError):
    """The URI, an option or a credential is invalid or missing; `field` is its name."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message, field)
        self.field = field

    def __str__(self) -> str:
        return str(self.args[0])


class ModelNotFoundError(DownloadError):
    """The model, bucket, revision or file does not exist."""


class AccessDeniedError(DownloadError):
    """The server refuses the credentials, or a host or path is not allowed."""


class UnsafeNameError(DownloadError):
    """A remote file's name does not fit below the target directory."""


class ForeignFileError(DownloadError):
    """A folder or file of the target directory belongs to another user, or other users may write to it."""


class TooLargeError(DownloadError):
    """The model has more files or bytes than the limits allow."""


class InsufficientSpaceError(DownloadError):
    """The disk is full, or has too little free space for the model."""


class IntegrityError(DownloadError):
    """The bytes do not match the checksum, or the file keeps changing."""


class TransferError(DownloadError):
    """The server or the network fails; a later attempt resumes."""


class DownloadCancelledError(DownloadError):
    """The caller cancelled; a later attempt resumes."""
