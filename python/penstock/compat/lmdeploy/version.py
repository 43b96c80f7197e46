"""`lmdeploy.version`: the version of Penstock."""

from penstock import __version__

__all__ = ["__version__", "version_info"]

#: The numbers of `__version__`.
version_info = tuple(int(number) for number in __version__.split(".")[:3] if number.isdigit())
