"""Shared by the tests: generated checkpoints, helpers that run the engine, and the transformers oracle."""
