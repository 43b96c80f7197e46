"""`lmdeploy.utils`: the logger."""

import logging

__all__ = ["get_logger"]


def get_logger(
    name: str | None = None,
    log_file: str | None = None,
    log_level: int | str | None = None,
    file_mode: str = "w",
) -> logging.Logger:
    """The logger of this name, by default `penstock`.

    `log_level` sets its level. `log_file` adds a file, opened with `file_mode`.
    """
    logger = logging.getLogger("penstock" if name in (None, "lmdeploy") else name)
    if log_level is not None:
        logger.setLevel(log_level)
    if log_file is not None:
        logger.addHandler(logging.FileHandler(log_file, file_mode, encoding="utf-8"))
    return logger
