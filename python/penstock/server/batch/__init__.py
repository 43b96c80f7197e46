"""Batches of requests in OpenAI's file format, for `penstock batch`, `/v1/files` and `/v1/batches`."""
