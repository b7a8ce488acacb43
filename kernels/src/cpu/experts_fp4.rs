//! Experts with activations of four bits: rows are replaced by what quantizing leaves of them (`oracle::round_to_fp4`, with
//! its bits), and everything else is done by the ordinary products.

use rayon::prelude::*;

use super::Isa;
use super::experts::{Expert, GatedScratch, Uses};
use super::isa::Kernel;
use super::lanes::Lanes;
use super::linear::linear;
use crate::codec::{e4m3, group_scale};
use crate::oracle::scale_of_row;

/// Columns that share an E4M3 scale.
const BLOCK: usize = 16;
/// Elements a task should have at least, so that starting it does not cost more than doing it.
const ELEMENTS_A_TASK: usize = 1 << 14;

/// [`super::experts`] with activations of four bits: what enters a projection of an expert is quantized row by row, as
/// [`crate::oracle::round_to_fp4`] does. Added in slot order.
pub fn experts_fp4<'a>(
    isa: Isa,
    out: &mut [f32],
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    hidden: usize,
    expert: impl Fn(u32) -> Expert<'a>,
) {
    let Some(uses) = Uses::new(out, x, ids, weights, hidden, expert) else { return };
    let mut entering = x.to_vec();
    round_to_fp4(isa, &mut entering, hidden);
    // For each expert in use, [its rows, hidden].
    let mut products = vec![0.0; uses.places.len() * hidden];
    let mut rest = &mut products[..];
    let mut tasks = Vec::with_capacity(uses.experts.len());
    for used in &uses.experts {
        let (of_expert, others) = rest.split_at_mut(used.places(hidden).len());
        rest = others;
        tasks.push((used, of_expert));
    }
    tasks.into_par_iter().for_each(|(used, out)| {
        let mut scratch = GatedScratch::default();
        let gated = scratch.gated(isa, &used.gathered(&entering, hidden), &used.expert);
        round_to_fp4(isa, gated, uses.inner);
        linear(isa, out, gated, &used.expert.down);
    });
    out.par_chunks_exact_mut(hidden).enumerate().for_each(|(row, out)| {
        out.fill(0.0);
        let places = uses.places[row * uses.slots..][..uses.slots].iter();
        for (place, weight) in places.zip(&weights[row * uses.slots..][..uses.slots]) {
            let at = uses.experts[place.used].places(hidden).start + place.index * hidden;
            out.iter_mut().zip(&products[at..][..hidden]).for_each(|(out, product)| *out += weight * product);
        }
    });
}

/// Replaces each row of `x: [rows, cols]` by what four bits leave of it: the bits of [`crate::oracle::round_to_fp4`].
///
/// # Panics
/// If rows are not whole blocks of 16.
pub fn round_to_fp4(isa: Isa, x: &mut [f32], cols: usize) {
    assert!(x.len().is_multiple_of(cols) && cols.is_multiple_of(BLOCK));
    x.par_chunks_mut(ELEMENTS_A_TASK.next_multiple_of(cols)).for_each(|x| isa.run(RoundRows { x, cols }));
}

struct RoundRows<'a> {
    x: &'a mut [f32],
    cols: usize,
}

impl Kernel for RoundRows<'_> {
    type Output = ();

    // Plain loops without branches over blocks: the compiler makes vectors of them, of the width that `L` stands for.
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        for row in self.x.chunks_exact_mut(self.cols) {
            let blocks = row.as_chunks_mut::<BLOCK>().0;
            let mut max = 0;
            for block in &mut *blocks {
                block.iter_mut().for_each(|value| *value = rounded_to_bf16(*value));
                max = block.iter().fold(max, |max: u32, value| max.max(value.abs().to_bits()));
            }
            let scale = scale_of_row(f32::from_bits(max));
            for block in blocks {
                let max = f32::from_bits(block.iter().fold(0, |max: u32, value| max.max(value.abs().to_bits())));
                let divisor = if max.is_finite() { e4m3(group_scale(max, scale)) * scale } else { f32::NAN };
                block.iter_mut().for_each(|value| {
                    *value = rounded_to_bf16(rounded_to_e2m1(*value / divisor) * divisor);
                });
            }
        }
    }
}

/// To the nearest BF16, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn rounded_to_bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    let rounded = f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000);
    if value.is_nan() { value } else { rounded }
}

/// To the nearest E2M1, ties to the even code: multiples of a half up to two, of one up to four, of two up to six.
#[inline(always)]
fn rounded_to_e2m1(value: f32) -> f32 {
    let magnitude = value.abs();
    let step = if magnitude < 2.0 { 0.5 } else { 1.0 };
    let step = if magnitude < 4.0 { step } else { 2.0 };
    ((value / step).round_ties_even() * step).clamp(-6.0, 6.0)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::oracle;

    /// Every BF16 in the place of one value of a block whose largest is six, and every one as the largest of a row.
    #[test]
    fn rounding_is_the_oracles_bit_for_bit() {
        let mut x = Vec::new();
        for bits in 0..=u16::MAX {
            let value = bf16::from_bits(bits).to_f32();
            let mut row = [0.0; 2 * BLOCK];
            row[..4].copy_from_slice(&[value, value / 3.0, -value / 7.0, value * 0.999]);
            row[BLOCK..BLOCK + 2].copy_from_slice(&[value / 64.0, 6.0]);
            x.extend(row);
            // Alone, so that it decides the row's scale.
            row[BLOCK + 1] = -0.0;
            x.extend(row);
        }
        let mut expected = x.clone();
        oracle::round_to_fp4(&mut expected, 2 * BLOCK);
        for isa in Isa::present() {
            let mut found = x.clone();
            round_to_fp4(isa, &mut found, 2 * BLOCK);
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                assert!(same, "{isa}: value {index} is {found:e}, not {expected:e}, of {:e}", x[index]);
            }
        }
    }
}
