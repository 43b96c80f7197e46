//! The reference implementation of every kernel: one plain loop per operation, in f64, over row-major arrays.
//!
//! The tables in `arch` are tested against it; no other code calls it.

/// `out[t][r] = sum over k of x[t][k] * weights[r][k]`.
pub fn matmul(x: &[f32], weights: &[f32], columns: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(columns) {
        for w in weights.chunks_exact(columns) {
            out.push(x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>() as f32);
        }
    }
    out
}

/// `scale * b (a x)` of each row of `x`, with `a` of `rank` rows of `columns`.
pub fn low_rank(x: &[f32], a: &[f32], b: &[f32], rank: usize, columns: usize, scale: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(columns) {
        let dot = |a: &[f32]| x.iter().zip(a).map(|(x, a)| f64::from(*x) * f64::from(*a)).sum::<f64>();
        let hidden: Vec<f64> = a.chunks_exact(columns).map(dot).collect();
        for b in b.chunks_exact(rank) {
            let sum: f64 = hidden.iter().zip(b).map(|(hidden, b)| hidden * f64::from(*b)).sum();
            out.push((f64::from(scale) * sum) as f32);
        }
    }
    out
}

/// `x / sqrt(mean(x^2) + eps) * weight` for each `weight.len()` floats.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks_exact(weight.len()) {
        let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + f64::from(eps)).sqrt();
        out.extend(x.iter().zip(weight).map(|(x, w)| (f64::from(*x) * factor * f64::from(*w)) as f32));
    }
    out
}

/// `silu(gate) * up` of rows that are the gate followed by up.
pub fn silu_mul(gate_up: &[f32], width: usize) -> Vec<f32> {
    gated(gate_up, width, |x| x / (1.0 + (-x).exp()))
}

/// `gelu(gate) * up`, with the tanh approximation of gelu.
pub fn gelu_tanh_mul(gate_up: &[f32], width: usize) -> Vec<f32> {
    gated(gate_up, width, |x| {
        0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
    })
}

fn gated(gate_up: &[f32], width: usize, gate: impl Fn(f64) -> f64) -> Vec<f32> {
    let mut out = Vec::new();
    for row in gate_up.chunks_exact(2 * width) {
        let (gates, ups) = row.split_at(width);
        out.extend(gates.iter().zip(ups).map(|(g, u)| (gate(f64::from(*g)) * f64::from(*u)) as f32));
    }
    out
}

/// Rotates float i of a head with float i + `cos.len()`.
pub fn rope(head: &[f32], cos: &[f32], sin: &[f32]) -> Vec<f32> {
    let mut out = head.to_vec();
    for i in 0..cos.len() {
        let (a, b) = (f64::from(head[i]), f64::from(head[i + cos.len()]));
        let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
        out[i] = (a * c - b * s) as f32;
        out[i + cos.len()] = (b * c + a * s) as f32;
    }
    out
}

/// The largest element that is not NaN, -inf if there is none.
pub fn max(x: &[f32]) -> f32 {
    x.iter().copied().filter(|x| !x.is_nan()).fold(f32::NEG_INFINITY, f32::max)
}

/// The lowest index of the largest element that is not NaN, 0 if there is none.
pub fn argmax(x: &[f32]) -> usize {
    x.iter().position(|value| *value == max(x)).unwrap_or(0)
}

/// `exp((x - shift) * factor)`; 0 for NaN.
pub fn exp_weights(x: &[f32], shift: f32, factor: f32) -> Vec<f32> {
    let weight = |x: f32| ((f64::from(x) - f64::from(shift)) * f64::from(factor)).exp() as f32;
    x.iter().map(|x| if x.is_nan() { 0.0 } else { weight(*x) }).collect()
}

/// Minus infinity where bit `i % 32` of word `i / 32` is not set or does not exist.
pub fn mask(x: &[f32], words: &[u32]) -> Vec<f32> {
    let is_set = |i: usize| words.get(i / 32).is_some_and(|word| word >> (i % 32) & 1 == 1);
    x.iter().enumerate().map(|(i, x)| if is_set(i) { *x } else { f32::NEG_INFINITY }).collect()
}

/// One query head over its visible keys and values, `[positions, q.len()]` each.
pub fn attention(q: &[f32], keys: &[f32], values: &[f32], scale: f32, softcap: Option<f32>) -> Vec<f32> {
    let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
    let cap = |score: f64| softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
    let scores: Vec<f64> = keys.chunks_exact(q.len()).map(|k| cap(dot(k) * f64::from(scale))).collect();
    let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - best).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..q.len())
        .map(|d| {
            let weighted = weights.iter().zip(values.chunks_exact(q.len()));
            (weighted.map(|(weight, v)| weight * f64::from(v[d])).sum::<f64>() / sum) as f32
        })
        .collect()
}
