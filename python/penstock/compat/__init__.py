"""Programming interfaces of other engines, on Penstock's public API."""
