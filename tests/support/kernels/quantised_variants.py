"""The variants of the kernels of quantised weights, for the tests and for ``tools/build_kernels.py``."""

from __future__ import annotations

from support.paths import DATA

#: The only target of the kernels of ``*_warpgroup.cu``.
WARPGROUP_TARGET = "sm_90a"

_LINES = (DATA / "cuda_quantised_variants.txt").read_text().splitlines()

#: The variants of ``gemm_quantised.cu`` that a matrix can have. ``quantised_matrix.rs`` tests the list.
VARIANTS = [line.partition(" ")[0] for line in _LINES]
#: Those that ``gemm_quantised_warpgroup.cu`` has, too.
WARPGROUP_VARIANTS = [line.partition(" ")[0] for line in _LINES if line.endswith(" warpgroups")]
