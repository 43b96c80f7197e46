"""`lmdeploy.version`: the version of the emulated API; Penstock's own is `penstock.__version__`."""

__all__ = ["__version__", "version_info"]

__version__ = "0.14.0"
#: The numbers of `__version__`.
version_info = (0, 14, 0)
