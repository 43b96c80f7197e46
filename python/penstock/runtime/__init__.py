"""The AIBrix AI Engine Runtime: a sidecar that manages an inference engine, and its model downloader."""
