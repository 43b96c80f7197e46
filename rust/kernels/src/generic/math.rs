//! exp and tanh of 16 lanes.
//!
//! `exp`: x = n ln 2 + r with |r| <= ln 2 / 2, then e^r by a polynomial, then times 2^n. The error is at most 1 ulp
//! with fused multiply-adds and 2 ulp without (a test covers the range); exp(0) is exactly 1, exp(-inf) is 0, an
//! overflow is inf, NaN stays NaN.

use crate::simd::Simd;

/// ln 2 as two floats; the first ends in zero bits, so that its product with n is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// e^r on [-ln 2 / 2, ln 2 / 2]: two Taylor coefficients, then those of the least maximal relative error, 3.1e-9. One
/// degree less gives 1.1e-7, twice the rounding error.
const EXP: [f32; 7] = [1.0, 1.0, 0.499_999_94, 0.166_665_2, 0.041_668_4, 0.008_368_851, 0.001_381_432];

/// n and e^r.
#[inline(always)]
fn reduce_exp<S: Simd>(s: S, x: S::V) -> (S::V, S::V) {
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.neg_mul_add(n, s.splat(LN_2_HIGH), x);
    let r = s.neg_mul_add(n, s.splat(LN_2_LOW), r);
    let mut p = s.splat(EXP[6]);
    let mut i = 6;
    while i > 0 {
        i -= 1;
        p = s.mul_add(p, r, s.splat(EXP[i]));
    }
    (n, p)
}

/// e^x.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Beyond these bounds the result is inf or 0; min and max return the second argument if x is NaN.
    let (n, p) = reduce_exp(s, s.min(s.splat(89.0), s.max(s.splat(-105.0), x)));
    // 2^n is not a normal float for n = 128 and below -126; both factors are.
    let half = s.round(s.mul(n, s.splat(0.5)));
    s.mul(s.mul(p, s.exp2(half)), s.exp2(s.sub(n, half)))
}

/// e^x for x <= 0; a subnormal result is 0. A third cheaper than [`exp`].
#[inline(always)]
pub(crate) fn exp_of_nonpositive<S: Simd>(s: S, x: S::V) -> S::V {
    let (n, p) = reduce_exp(s, s.max(s.splat(-105.0), x));
    s.mul(p, s.exp2(s.max(s.splat(-127.0), n)))
}

/// 1 - 2 / (exp(2x) + 1); the absolute error is at most 2e-7.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.add(x, x));
    let one = s.splat(1.0);
    s.sub(one, s.div(s.splat(2.0), s.add(e, one)))
}

/// x / (1 + exp(-x)).
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(x, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// The tanh approximation of gelu: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written as x sigmoid(2 ...).
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let cubic = s.mul_add(s.mul(s.splat(0.044_715), s.mul(x, x)), x, x);
    let one = s.splat(1.0);
    s.div(x, s.add(one, exp(s, s.mul(s.splat(-2.0 * 0.797_884_6), cubic))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::portable::Portable;
    use crate::panel::LANES;

    #[derive(Clone, Copy, Debug)]
    enum Function {
        Exp,
        ExpOfNonpositive,
        Tanh,
        Silu,
        GeluTanh,
    }

    type Lanes = [f32; LANES];
    type Apply = fn(Function, Lanes) -> Lanes;

    #[inline(always)]
    fn apply<S: Simd>(s: S, function: Function, x: Lanes) -> Lanes {
        let x = s.vector(x);
        s.to_array(match function {
            Function::Exp => exp(s, x),
            Function::ExpOfNonpositive => exp_of_nonpositive(s, x),
            Function::Tanh => tanh(s, x),
            Function::Silu => silu(s, x),
            Function::GeluTanh => gelu_tanh(s, x),
        })
    }

    /// Every vector type that this CPU supports, with the error bound of exp in ulp.
    fn vector_types() -> Vec<(Apply, f64)> {
        let fused = cfg!(any(target_arch = "aarch64", target_feature = "fma"));
        let mut all: Vec<(Apply, f64)> =
            vec![(|function, x| apply(Portable, function, x), if fused { 1.0 } else { 2.0 })];
        #[cfg(target_arch = "x86_64")]
        if crate::Isa::Avx512.is_available() {
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512(function: Function, x: Lanes) -> Lanes {
                // SAFETY: this function has the features.
                apply(unsafe { crate::arch::x86_64::avx512::Avx512::new_unchecked() }, function, x)
            }
            // SAFETY: the instruction set is available.
            all.push((|function, x| unsafe { avx512(function, x) }, 1.0));
        }
        #[cfg(target_arch = "x86_64")]
        if crate::Isa::Avx2.is_available() {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2(function: Function, x: Lanes) -> Lanes {
                // SAFETY: this function has the features.
                apply(unsafe { crate::arch::x86_64::avx2::Avx2::new_unchecked() }, function, x)
            }
            // SAFETY: the instruction set is available.
            all.push((|function, x| unsafe { avx2(function, x) }, 1.0));
        }
        #[cfg(target_arch = "aarch64")]
        if crate::Isa::Neon.is_available() {
            #[target_feature(enable = "neon")]
            fn neon(function: Function, x: Lanes) -> Lanes {
                // SAFETY: this function has the feature.
                let neon = unsafe { crate::arch::aarch64::neon::Neon::<false>::new_unchecked() };
                apply(neon, function, x)
            }
            // SAFETY: the instruction set is available.
            all.push((|function, x| unsafe { neon(function, x) }, 1.0));
        }
        all
    }

    /// The error in units of the last place (of 2^-149 if `exact` is subnormal).
    fn ulps(got: f32, exact: f64) -> f64 {
        let exponent = exact.abs().log2().floor().max(-126.0);
        (f64::from(got) - exact).abs() / (exponent - 23.0).exp2()
    }

    /// The largest error of an exp over 2^20 points of a range.
    fn worst(apply: Apply, function: Function, range: std::ops::Range<f32>) -> f64 {
        let steps = 1 << 16;
        let mut worst = 0.0_f64;
        for i in 0..steps {
            let at = |lane| (i * LANES + lane) as f32 / (steps * LANES) as f32;
            let x: Lanes = std::array::from_fn(|lane| range.start + (range.end - range.start) * at(lane));
            for (x, y) in x.iter().zip(apply(function, x)) {
                worst = worst.max(ulps(y, f64::from(*x).exp()));
            }
        }
        worst
    }

    #[test]
    fn exp_error_is_within_bound_over_the_range() {
        for (apply, bound) in vector_types() {
            for range in [-103.0..-87.0, -87.0..88.7, -1.0..1.0] {
                let error = worst(apply, Function::Exp, range.clone());
                assert!(error <= bound, "{error} ulp in {range:?}");
            }
            let error = worst(apply, Function::ExpOfNonpositive, -87.0..0.0);
            assert!(error <= bound, "{error} ulp");
        }
    }

    #[test]
    fn exp_of_special_values_is_exact() {
        let mut x = [0.0; LANES];
        x[..6].copy_from_slice(&[-0.0, f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -1e30, 90.0]);
        for (apply, _) in vector_types() {
            let y = apply(Function::Exp, x);
            assert_eq!(
                [y[0], y[1], y[2], y[4], y[5], y[6]],
                [1.0, 0.0, f32::INFINITY, 0.0, f32::INFINITY, 1.0]
            );
            assert!(y[3].is_nan());
            let y = apply(Function::ExpOfNonpositive, x);
            assert_eq!([y[0], y[1], y[4], y[6]], [1.0, 0.0, 0.0, 1.0]);
            assert!(y[3].is_nan());
        }
    }

    #[test]
    fn tanh_and_activations_are_close_and_saturate() {
        for (apply, _) in vector_types() {
            let close = |function, x: f32, want: f64| {
                let got = f64::from(apply(function, [x; LANES])[3]);
                let tolerance = 4e-7 * want.abs().max(1.0);
                assert!((got - want).abs() < tolerance, "{function:?}({x}) is {got}, should be {want}");
            };
            for i in -1500..1500 {
                let x = i as f32 * 0.0137;
                let wide = f64::from(x);
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
                close(Function::Tanh, x, wide.tanh());
                close(Function::Silu, x, wide / (1.0 + (-wide).exp()));
                close(Function::GeluTanh, x, 0.5 * wide * (1.0 + inner.tanh()));
            }
            assert_eq!(apply(Function::Silu, [-200.0; LANES])[0], 0.0);
            assert_eq!(apply(Function::Tanh, [1e20; LANES])[0], 1.0);
        }
    }
}
