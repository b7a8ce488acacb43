//! Matrix products with weights stored `[out, in]`.

/// `out[r, n] = sum over k of x[r, k] * weight[n, k]`, summed in f64 and rounded once.
/// `x: [rows, k]`, `weight: [n, k]`, `out: [rows, n]`; `k` is given, the rest follows.
pub fn linear(out: &mut [f32], x: &[f32], weight: &[f32], k: usize) {
    let n = weight.len() / k;
    for (out, x) in out.chunks_exact_mut(n).zip(x.chunks_exact(k)) {
        for (out, weight) in out.iter_mut().zip(weight.chunks_exact(k)) {
            *out = x.iter().zip(weight).map(|(&x, &weight)| f64::from(x) * f64::from(weight)).sum::<f64>() as f32;
        }
    }
}
