"""AIBrix's downloader on Penstock: `download_model`, and `python -m aibrix.downloader`."""

from penstock.runtime.downloader import download_model

__all__ = ["download_model"]
