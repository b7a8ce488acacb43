//! Products of activations with BF16 matrices. `cu/gemm`.
//!
//! A product has several kernels, for few rows and for many, for Hopper and for every GPU from Ampere on. All of them
//! give the same bits, so the choice may depend on how many rows there happen to be: [`Linear`] makes it.

use half::bf16;

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};
use super::sample::TileBest;
use super::strips::Strips;

/// Tokens of the vocabulary in a tile of [`TileBest`].
pub const VOCABULARY_TILE: usize = 256;

/// A kernel whose blocks compute `rows` weight rows of `tokens` rows of activations.
#[derive(Clone, Debug)]
pub(super) struct TileKernel {
    pub(super) kernel: Kernel,
    pub(super) rows: usize,
    pub(super) tokens: usize,
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

impl TileKernel {
    pub(super) fn load(
        device: &Device,
        module: &str,
        name: &str,
        [rows, tokens]: [usize; 2],
        threads: u32,
        shared_bytes: u32,
    ) -> Result<Self, CudaError> {
        let kernel = device.kernel(module, name)?;
        kernel.allow_shared(shared_bytes)?;
        Ok(Self { kernel, rows, tokens, threads, shared_bytes })
    }

    /// Blocks for `n` weight rows of `rows` rows of activations.
    fn grid(&self, n: usize, rows: usize) -> [u32; 3] {
        [n.div_ceil(self.rows) as u32, rows.div_ceil(self.tokens) as u32, 1]
    }

    fn blocks(&self, n: usize, rows: usize) -> usize {
        n.div_ceil(self.rows) * rows.div_ceil(self.tokens)
    }
}

/// The kernels of this family.
#[derive(Clone, Debug)]
pub struct Linear {
    /// Multiprocessors: a product should have about as many blocks.
    multiprocessors: usize,
    /// For BF16 results, SwiGLU and the best tokens: by descending size of a block's tile.
    bf16: Vec<TileKernel>,
    gated: Vec<TileKernel>,
    best: Vec<TileKernel>,
    /// For f32 results.
    f32: TileKernel,
}

impl Linear {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let any = |name: &str, tile, threads, shared| TileKernel::load(device, "linear", name, tile, threads, shared);
        let wide = |name: &str, tile: [usize; 2], stages: u32| {
            // A stage is 64 columns, 128 bytes, of both; then come the numbers of the rows.
            let shared = (tile[0] + tile[1]) as u32 * 128 * stages + 1024;
            TileKernel::load(device, "linear_sm90a", name, tile, 256, shared)
        };
        let mut linear = Self {
            multiprocessors: device.properties().multiprocessors as usize,
            bf16: vec![
                any("linear_narrow_bf16", [32, 32], 256, 16_384 * 5)?,
                any("linear_thin_bf16", [16, 32], 128, 12_288 * 6)?,
            ],
            gated: vec![
                any("linear_narrow_gated", [32, 32], 256, 16_384 * 5)?,
                any("linear_thin_gated", [16, 32], 128, 12_288 * 6)?,
            ],
            best: vec![any("linear_broad_best", [256, 32], 256, 36_864 * 2)?],
            f32: any("linear_thin_f32", [16, 32], 128, 12_288 * 6)?,
        };
        if device.has_module("linear_sm90a")? {
            let tiles = [("256x128", [256, 128], 4), ("128x128", [128, 128], 6), ("128x64", [128, 64], 4)];
            for (place, (tile, shape, stages)) in tiles.into_iter().enumerate() {
                linear.bf16.insert(place, wide(&format!("linear_wide_bf16_{tile}"), shape, stages)?);
                linear.gated.insert(place, wide(&format!("linear_wide_gated_{tile}"), shape, stages)?);
            }
            linear.best.insert(0, wide("linear_wide_best_256x128", [256, 128], 4)?);
            linear.best.insert(1, wide("linear_wide_best_256x64", [256, 64], 5)?);
        } else {
            linear.bf16.insert(0, any("linear_many_bf16", [256, 64], 256, 40_960 * 2)?);
            linear.gated.insert(0, any("linear_many_gated", [256, 64], 256, 40_960 * 2)?);
            linear.best.insert(0, any("linear_many_best", [256, 64], 256, 40_960 * 2)?);
        }
        Ok(linear)
    }

    /// Whether `weights` can be multiplied by: BF16, and of a shape that the kernels know.
    pub fn check(weights: &Strips) -> Result<(), CudaError> {
        weights.format.check(weights.rows, weights.cols)?;
        if weights.format == super::strips::Format::Bf16 {
            return Ok(());
        }
        let what = format!("{:?} outside experts", weights.format);
        Err(CudaError::Unsupported { operation: "a matrix product", what })
    }

    /// The largest tile whose tokens are at most twice what there is and whose blocks fill the GPU; else the one with
    /// the most blocks.
    fn choose<'a>(&self, kernels: &'a [TileKernel], n: usize, rows: usize) -> &'a TileKernel {
        let fits = |kernel: &&TileKernel| kernel.tokens <= 32.max(rows.next_multiple_of(32));
        let fills = |kernel: &&TileKernel| kernel.blocks(n, rows) * 4 >= self.multiprocessors * 3;
        let all = || kernels.iter().filter(fits);
        all().find(fills).or_else(|| all().max_by_key(|kernel| kernel.blocks(n, rows))).expect("a tile of 32 tokens")
    }

    /// `out[t, n] = sum over k of x[t, k] w[n, k]`, rounded. `x: [rows, K]`, `out: [rows, N]`.
    ///
    /// # Safety
    /// The pointers are of that many elements, aligned to 16 bytes; `out` does not overlap `x`; `weights` is a BF16 matrix
    /// as its fields say that [`check`](Self::check) found nothing wrong with.
    pub unsafe fn bf16(
        &self,
        out: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        rows: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.bf16_apart(out, x, weights, rows, weights.rows) }
    }

    /// As [`bf16`](Self::bf16), rows of `out` beginning `pitch` elements apart.
    ///
    /// # Safety
    /// As [`bf16`](Self::bf16); `pitch` is a multiple of 8.
    pub unsafe fn bf16_apart(
        &self,
        out: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        rows: usize,
        pitch: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.product(self.choose(&self.bf16, weights.rows, rows), out, x, weights, rows, pitch) }
    }

    /// As [`bf16`](Self::bf16), not rounded.
    ///
    /// # Safety
    /// As [`bf16`](Self::bf16).
    pub unsafe fn f32(
        &self,
        out: Pointer<f32>,
        x: Pointer<bf16>,
        weights: &Strips,
        rows: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.product(&self.f32, out, x, weights, rows, weights.rows) }
    }

    /// `act = silu(gate x) * (up x)`: both products, SiLU and the result are rounded. `weights` is the pair of gate and
    /// up; `act: [rows, N / 2]`.
    ///
    /// # Safety
    /// As [`bf16`](Self::bf16).
    pub unsafe fn gate_up(
        &self,
        act: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        rows: usize,
    ) -> Result<(), CudaError> {
        let with = self.choose(&self.gated, weights.rows, rows);
        // SAFETY: the caller's promise.
        unsafe { self.product(with, act, x, weights, rows, weights.rows / 2) }
    }

    unsafe fn product<T: Copy>(
        &self,
        with: &TileKernel,
        out: Pointer<T>,
        x: Pointer<bf16>,
        weights: &Strips,
        rows: usize,
        pitch: usize,
    ) -> Result<(), CudaError> {
        let numbers = [rows as i32, weights.rows as i32, weights.cols as i32, pitch as i32];
        let shape = LaunchShape::new(with.grid(weights.rows, rows), with.threads).shared(with.shared_bytes);
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            with.kernel.launch(
                shape.overlapping(),
                &[
                    argument(&out),
                    argument(&x),
                    argument(&weights.data),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                    argument(&numbers[2]),
                    argument(&numbers[3]),
                ],
            )
        }
    }

    /// The best tokens of each row and tile of [`VOCABULARY_TILE`] rows of the head, whose logits are not written.
    ///
    /// # Safety
    /// As [`bf16`](Self::bf16); `best` as its fields say, with `N / 256` tiles, rounded up.
    pub unsafe fn head_best(
        &self,
        best: &TileBest,
        x: Pointer<bf16>,
        weights: &Strips,
        rows: usize,
    ) -> Result<(), CudaError> {
        let with = self.choose(&self.best, weights.rows, rows);
        let numbers = [rows as i32, weights.rows as i32, weights.cols as i32];
        let shape = LaunchShape::new(with.grid(weights.rows, rows), with.threads).shared(with.shared_bytes);
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            with.kernel.launch(
                shape.overlapping(),
                &[
                    argument(&best.tokens),
                    argument(&best.logits),
                    argument(&best.sums),
                    argument(&x),
                    argument(&weights.data),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                    argument(&numbers[2]),
                ],
            )
        }
    }
}
