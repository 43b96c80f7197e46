"""AIBrix's AI Engine Runtime on Penstock: the commands `aibrix_runtime` and `aibrix_download`."""

from penstock import __version__

__all__ = ["__version__"]
