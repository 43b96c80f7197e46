"""The requests of each API, as `msgspec` structures."""
