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
    /// Columns of a stage, of which the weights must have a multiple.
    columns: usize,
    /// What 64 columns of a block take, in nanoseconds on an H200: only for comparison with other tiles.
    cost: usize,
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
        Ok(Self { kernel, rows, tokens, threads, shared_bytes, columns: 128, cost: 0 })
    }

    fn with(self, columns: usize, cost: usize) -> Self {
        Self { columns, cost, ..self }
    }

    /// Blocks for `n` weight rows of `rows` rows of activations.
    fn grid(&self, n: usize, rows: usize) -> [u32; 3] {
        [rows.div_ceil(self.tokens) as u32, n.div_ceil(self.rows) as u32, 1]
    }

    /// What a product of `n` weight rows with `rows` rows of activations takes, for comparison.
    fn cost(&self, n: usize, rows: usize, multiprocessors: usize) -> usize {
        // Blocks of 16 weight rows get in each other's way before there is one for every multiprocessor.
        let at_once = if self.rows > 16 { multiprocessors } else { multiprocessors * 3 / 4 };
        (n.div_ceil(self.rows) * rows.div_ceil(self.tokens)).div_ceil(at_once) * self.cost
    }
}

/// The kernels of this family, by what becomes of the products.
#[derive(Clone, Debug)]
pub struct Linear {
    multiprocessors: usize,
    bf16: Vec<TileKernel>,
    f32: Vec<TileKernel>,
    gated: Vec<TileKernel>,
    best: Vec<TileKernel>,
}

impl Linear {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let hopper = device.has_module("linear_few_sm90a")? && device.has_module("linear_wide_sm90a")?;
        let of = |what: &str| if hopper { Self::for_hopper(device, what) } else { Self::for_any(device, what) };
        Ok(Self {
            multiprocessors: device.properties().multiprocessors as usize,
            bf16: of("bf16")?,
            f32: of("f32")?,
            gated: of("gated")?,
            best: of("best")?,
        })
    }

    /// `cu/gemm/linear.cu`.
    fn for_any(device: &Device, what: &str) -> Result<Vec<TileKernel>, CudaError> {
        // Threads, bytes of a stage, stages, cost.
        let tiles = [
            ("thin", [16, 32], 128, 12_800 * 6, 220),
            ("narrow", [32, 32], 256, 16_896 * 5, 240),
            ("broad", [256, 32], 256, 37_376 * 2, 700),
            ("many", [256, 64], 256, 41_984 * 2, 950),
        ];
        let wanted: &[&str] = match what {
            "best" => &["broad", "many"],
            "f32" => &["thin"],
            _ => &["thin", "narrow", "many"],
        };
        let tiles = tiles.into_iter().filter(|(tile, ..)| wanted.contains(tile));
        let load = |(tile, shape, threads, shared, cost)| {
            let kernel = TileKernel::load(device, "linear", &format!("linear_{tile}_{what}"), shape, threads, shared)?;
            Ok(kernel.with(128, cost))
        };
        tiles.map(load).collect()
    }

    /// `cu/gemm/linear_few_sm90a.cu` and `cu/gemm/linear_wide_sm90a.cu`.
    fn for_hopper(device: &Device, what: &str) -> Result<Vec<TileKernel>, CudaError> {
        // Columns of a stage, stages, threads, cost. A row of tokens is padded by 16 bytes.
        let few = [
            ([16, 16], 256, 6, 192, 110),
            ([16, 32], 256, 4, 256, 150),
            ([32, 32], 256, 4, 384, 140),
            ([64, 32], 128, 4, 384, 215),
        ];
        // Stages of 64 columns, cost.
        let wide = [([128, 64], 8, 290), ([128, 128], 6, 420), ([256, 64], 5, 400), ([256, 128], 4, 700)];
        let (wanted_few, wanted_wide): (&[[usize; 2]], &[[usize; 2]]) = match what {
            "best" => (&[], &[[256, 64], [256, 128]]),
            "f32" => (&[[16, 16], [32, 32]], &[[128, 64]]),
            _ => (&[[16, 32], [32, 32], [64, 32]], &[[128, 64], [128, 128], [256, 128]]),
        };
        let mut kernels = Vec::new();
        for (shape @ [rows, tokens], columns, stages, threads, cost) in few {
            if wanted_few.contains(&shape) {
                let shared = stages * (rows * columns * 2 + tokens * (columns * 2 + 16) + 16);
                let name = format!("linear_few_{what}_{rows}x{tokens}");
                let kernel = TileKernel::load(device, "linear_few_sm90a", &name, shape, threads, shared as u32)?;
                kernels.push(kernel.with(columns, cost));
            }
        }
        for (shape @ [rows, tokens], stages, cost) in wide {
            if wanted_wide.contains(&shape) {
                let shared = stages * ((rows + tokens) * 128 + 16);
                let name = format!("linear_wide_{what}_{rows}x{tokens}");
                let kernel = TileKernel::load(device, "linear_wide_sm90a", &name, shape, 384, shared as u32)?;
                kernels.push(kernel.with(64, cost));
            }
        }
        Ok(kernels)
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

    /// The kernel whose tiles suit the size best. All give the same bits.
    fn choose<'a>(&self, kernels: &'a [TileKernel], weights: &Strips, rows: usize) -> &'a TileKernel {
        let fits = |kernel: &&TileKernel| weights.cols.is_multiple_of(kernel.columns);
        let cost = |kernel: &&TileKernel| kernel.cost(weights.rows, rows, self.multiprocessors);
        kernels.iter().filter(fits).min_by_key(cost).expect("a kernel for widths that are multiples of 128")
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
        unsafe { self.product(self.choose(&self.bf16, weights, rows), out, x, weights, rows, pitch) }
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
        unsafe { self.product(self.choose(&self.f32, weights, rows), out, x, weights, rows, weights.rows) }
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
        let with = self.choose(&self.gated, weights, rows);
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
        let with = self.choose(&self.best, weights, rows);
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
