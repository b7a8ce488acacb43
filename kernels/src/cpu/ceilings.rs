//! What this machine can do at best, measured: the yardsticks that benchmarks are held against.

use std::hint::black_box;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::Isa;
use super::isa::Kernel;
use super::lanes::{LANES, Lanes};
#[cfg(target_arch = "x86_64")]
use super::tiles;

/// Memory that is read for the bandwidth: far more than any cache.
const READ_BYTES: usize = 512 << 20;
/// Each figure is the best of this many tries, for a ceiling is what the machine can do undisturbed.
const TRIES: usize = 5;

/// Bytes a second that all threads of the current pool read from memory together.
#[must_use]
pub fn read_bandwidth(isa: Isa) -> f64 {
    let values = vec![1.0f32; READ_BYTES / size_of::<f32>()];
    let piece = values.len().div_ceil(rayon::current_num_threads());
    let read = || values.par_chunks(piece).map(|values| isa.run(Sum { values })).sum::<f32>();
    READ_BYTES as f64 / best_of(|| black_box(read()))
}

/// Floating-point operations a second, an addition and a product counted as two, that all threads of the current pool
/// reach together on registers alone, with the products that [`super::linear`] uses for stored weights on `isa`.
#[must_use]
pub fn multiply_rate(isa: Isa) -> f64 {
    const ROUNDS: usize = 200_000;
    let threads = rayon::current_num_threads();
    let flops = |_| {
        #[cfg(target_arch = "x86_64")]
        if isa.rounds_to_bf16() {
            return tiles::multiply_only(isa, ROUNDS);
        }
        isa.run(MultiplyOnly { rounds: ROUNDS })
    };
    let mut done = 0;
    let seconds = best_of(|| done = (0..threads).into_par_iter().with_max_len(1).map(flops).sum());
    done as f64 / seconds
}

/// The shortest of several runs, in seconds.
fn best_of<T>(mut work: impl FnMut() -> T) -> f64 {
    let mut timed = || {
        let started = Instant::now();
        work();
        started.elapsed()
    };
    (0..TRIES).map(|_| timed()).min().unwrap_or(Duration::MAX).as_secs_f64()
}

struct Sum<'a> {
    values: &'a [f32],
}

impl Kernel for Sum<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> f32 {
        const TOGETHER: usize = 8;
        let mut sums = [lanes.splat(0.0); TOGETHER];
        for vectors in self.values.as_chunks::<LANES>().0.as_chunks::<TOGETHER>().0 {
            for (sum, vector) in sums.iter_mut().zip(vectors) {
                *sum = lanes.add(*sum, lanes.load(vector));
            }
        }
        sums.into_iter().map(|sum| lanes.sum(sum)).sum()
    }
}

/// Sums that are added to in turn, more than an addition's latency asks for and fewer than there are registers.
struct MultiplyOnly {
    rounds: usize,
}

impl Kernel for MultiplyOnly {
    type Output = usize;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> usize {
        const SUMS: usize = 6;
        let factor = lanes.splat(black_box(0.999));
        let mut sums = [lanes.splat(1.0); SUMS];
        // Three times through the sums a round, so that the loop itself costs nothing.
        for _ in 0..self.rounds {
            for _ in 0..3 {
                for sum in &mut sums {
                    *sum = lanes.mul_add(*sum, factor, factor);
                }
            }
        }
        black_box(sums.map(|sum| lanes.sum(sum)));
        self.rounds * 3 * SUMS * LANES * 2
    }
}
