"""The addresses that one client has."""

from __future__ import annotations

import ipaddress

__all__ = ["network_of"]

_PREFIX = 64


def network_of(address: str) -> str:
    """The name of the client with this address: the address, or the first 64 bits of one of IPv6.

    A client with IPv6 usually has all addresses with these bits. Texts that are no address are returned.
    """
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])  # without the name of an interface
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found), _PREFIX), strict=False))
