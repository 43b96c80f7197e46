"""An emulated CUDA driver for tests: kernels run on the host. Never installed with the package."""
