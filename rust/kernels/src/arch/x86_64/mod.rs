//! x86-64. AVX-512 (with VNNI and BF16) and AMX get a file each beside `avx2`.

pub(crate) mod avx2;
