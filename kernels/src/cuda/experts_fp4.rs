//! The feed-forward of the chosen experts with activations of four bits. `cu/moe/fp4_rows.cu`, `cu/moe/experts_fp4_sm120f.cu`.
//!
//! What enters a projection is quantized row by row: `oracle::round_to_fp4`, bit for bit. GPUs of compute capability 12.x
//! multiply the codes; others take the rows that the codes stand for, in BF16, through the kernels of [`Experts`]: the same
//! function, summed in another order. The shared expert takes rows as they are.

use half::bf16;

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};
use super::experts::{Experts, Slots, shared_down, shared_gate_up};
use super::experts_int8::{Int8Experts, QuantizedRows};
use super::linear::Linear;
use super::strips::{Format, Strips};

/// The module of the products of four-bit numbers.
const MODULE: &str = "experts_fp4_sm120f";
/// Weight rows of a tile, threads and shared memory of a block, as in the source.
const ROWS: usize = 128;
const THREADS: u32 = 128;
const SHARED_BYTES: u32 = 46 * 1024;
/// Threads of a block that quantizes; a warp has a row.
const QUANTIZE_THREADS: u32 = 256;
const ROWS_A_BLOCK: usize = 8;

/// The kernels of this family.
#[derive(Clone, Debug)]
pub struct Fp4Experts {
    linear: Linear,
    products: Products,
}

#[derive(Clone, Debug)]
enum Products {
    /// Of codes.
    Native { quantize: Kernel, gate_up: Kernel, down: Kernel },
    /// Of the values they stand for.
    Widened { round: Kernel, experts: Experts },
}

impl Fp4Experts {
    /// Whether this GPU and build multiply four-bit numbers: weights are to be kept in [`Format::Nvfp4Codes`] then.
    pub fn is_native_on(device: &Device) -> Result<bool, CudaError> {
        device.has_module(MODULE)
    }

    /// Loads the kernels for experts of these formats: all [`Format::Nvfp4Codes`], or all [`Format::Nvfp4`].
    pub fn new(device: &Device, formats: &[Format]) -> Result<Self, CudaError> {
        let all = |kept: Format| formats.iter().all(|format| *format == kept);
        let products = if all(Format::Nvfp4) {
            let round = device.kernel("fp4_rows", "round_rows_fp4")?;
            Products::Widened { round, experts: Experts::new(device, formats)? }
        } else if all(Format::Nvfp4Codes) {
            let quantize = device.kernel("fp4_rows", "quantize_rows_fp4")?;
            let gate_up = device.kernel(MODULE, "experts_fp4_gate_up")?;
            let down = device.kernel(MODULE, "experts_fp4_down")?;
            gate_up.allow_shared(SHARED_BYTES)?;
            down.allow_shared(SHARED_BYTES)?;
            Products::Native { quantize, gate_up, down }
        } else {
            return unsupported(format!("{formats:?}, only NVFP4"));
        };
        Ok(Self { linear: Linear::new(device)?, products })
    }

    /// Whether codes are multiplied.
    #[must_use]
    pub fn is_native(&self) -> bool {
        matches!(self.products, Products::Native { .. })
    }

    /// As [`Experts::tile_rows`].
    #[must_use]
    pub fn tile_rows(&self, slots: usize, experts: usize) -> usize {
        match &self.products {
            Products::Native { .. } => Int8Experts::TILE_ROWS,
            Products::Widened { experts: kernels, .. } => kernels.tile_rows(slots, experts),
        }
    }

    /// As [`Experts::gate_up`].
    ///
    /// # Safety
    /// As there, with tiles of [`tile_rows`](Self::tile_rows); `scratch` has room for the rows of `x`.
    pub unsafe fn gate_up(
        &self,
        act: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        shared: Option<&Strips>,
        slots: &Slots<'_>,
        scratch: QuantizedRows,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.products {
                Products::Native { quantize, gate_up, .. } => {
                    Self::quantize(quantize, scratch, x, slots.rows, weights.cols)?;
                    Self::project(gate_up, act, scratch, weights, slots)?;
                }
                Products::Widened { round, experts } => {
                    let rounded = Self::round(round, scratch, x, slots.rows, weights.cols)?;
                    experts.gate_up(act, rounded, weights, None, slots)?;
                }
            }
            shared_gate_up(&self.linear, act, x, weights, shared, slots)
        }
    }

    /// As [`Experts::down`].
    ///
    /// # Safety
    /// As there, with tiles of [`tile_rows`](Self::tile_rows); `scratch` has room for the slots of `act`.
    #[expect(clippy::too_many_arguments, reason = "the parameters of the kernels")]
    pub unsafe fn down(
        &self,
        parts: Pointer<bf16>,
        act: Pointer<bf16>,
        weights: &Strips,
        shared: Option<&Strips>,
        slots: &Slots<'_>,
        stride: usize,
        scratch: QuantizedRows,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe {
            match &self.products {
                Products::Native { quantize, down, .. } => {
                    Self::quantize(quantize, scratch, act, slots.count(), weights.cols)?;
                    Self::project(down, parts, scratch, weights, slots)?;
                }
                Products::Widened { round, experts } => {
                    // `Experts::down` looks at the router's tiles before it waits. They were there before `gate_up`, which
                    // let what follows it start only after it had waited for them.
                    let rounded = Self::round(round, scratch, act, slots.count(), weights.cols)?;
                    experts.down(parts, rounded, weights, None, slots, stride)?;
                }
            }
            shared_down(&self.linear, parts, act, weights, shared, slots, stride)
        }
    }

    /// Writes what four bits leave of `x: [rows, cols]`, and says where.
    unsafe fn round(
        kernel: &Kernel,
        to: QuantizedRows,
        x: Pointer<bf16>,
        rows: usize,
        cols: usize,
    ) -> Result<Pointer<bf16>, CudaError> {
        let rounded: Pointer<bf16> = to.codes.cast();
        let numbers = [rows as i32, cols as i32];
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            kernel.launch(
                Self::shape_of_rows(rows),
                &[argument(&rounded), argument(&x), argument(&numbers[0]), argument(&numbers[1])],
            )?;
        }
        Ok(rounded)
    }

    /// Writes the codes and scales of `x: [rows, cols]`.
    unsafe fn quantize(
        kernel: &Kernel,
        to: QuantizedRows,
        x: Pointer<bf16>,
        rows: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        let numbers = [rows as i32, cols as i32];
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            kernel.launch(
                Self::shape_of_rows(rows),
                &[
                    argument(&to.codes),
                    argument(&to.scales),
                    argument(&x),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                ],
            )
        }
    }

    fn shape_of_rows(rows: usize) -> LaunchShape {
        LaunchShape::new([rows.div_ceil(ROWS_A_BLOCK) as u32, 1, 1], QUANTIZE_THREADS).overlapping()
    }

    unsafe fn project(
        kernel: &Kernel,
        out: Pointer<bf16>,
        x: QuantizedRows,
        weights: &Strips,
        slots: &Slots<'_>,
    ) -> Result<(), CudaError> {
        if weights.format != Format::Nvfp4Codes {
            return unsupported(format!("{:?}, which was not loaded", weights.format));
        }
        let blocks = weights.rows.div_ceil(ROWS) * slots.tiles_max;
        let shape = LaunchShape::new([blocks as u32, 1, 1], THREADS).shared(SHARED_BYTES).overlapping();
        let bytes = weights.format.matrix_bytes(weights.rows, weights.cols) as u64;
        let [tiles, tile_count, slot_rows, slot_parts] = slots.choices.routes();
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            kernel.launch(
                shape,
                &[
                    argument(&out),
                    argument(&x.codes),
                    argument(&x.scales),
                    argument(&weights.data),
                    argument(&bytes),
                    argument(&weights.global_scales),
                    tiles,
                    tile_count,
                    slot_rows,
                    slot_parts,
                    argument(&(weights.rows as i32)),
                    argument(&(weights.cols as i32)),
                ],
            )
        }
    }
}

fn unsupported<T>(what: String) -> Result<T, CudaError> {
    Err(CudaError::Unsupported { operation: "experts with activations of four bits", what })
}
