"""Engines that the runtime starts, watches and stops: `/v1/runtime`."""
