"""Messages for errors of the Hugging Face hub. Imports nothing of the package, for `penstock.compat`."""

from __future__ import annotations

__all__ = ["message_of"]


def message_of(error: Exception, name: str, command: str, kind: str = "model") -> str:
    """The message, in one line, for an error of the hub's library.

    `name` is `org/name`, or `org/name@revision`; `command` downloads the files, of a `kind` of repository.
    """
    from huggingface_hub import constants, errors

    if isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name}: access is restricted; accept the terms on the {kind}'s hub page, "
            "and set HF_TOKEN or run: hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{name}: not a local path and not found on the hub "
            f"(for a private {kind}, set HF_TOKEN or run: hf auth login)"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name}: revision {name.partition('@')[2].partition(':')[0] or 'main'} not found on the hub"
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        return f"{name}: not in the local cache, and the hub is offline; run this first: {command}"
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    # Of the HTTP library, which depends on the version of the hub's library.
    if {"ConnectError", "TimeoutException"} & {kind.__name__ for kind in type(error).__mro__}:
        hub = f"the hub at {constants.ENDPOINT} cannot be reached: {reason}"
        return f"{name}: not in the local cache, and {hub}"
    return f"{name}: download from the hub failed: {reason}"
