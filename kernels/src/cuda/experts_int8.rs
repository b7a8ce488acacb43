//! The feed-forward of the chosen experts with activations of eight bits. `cu/moe/experts_int8.cu`.
//!
//! What enters a projection is quantized in the groups of its weights; products are exact integers, and their sum is
//! rounded to BF16: `oracle::linear_int8`, bit for bit. The shared expert stays BF16.

use std::collections::BTreeMap;

use half::bf16;

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};
use super::experts::{Slots, shared_down, shared_gate_up};
use super::linear::Linear;
use super::strips::{Format, Strips};

/// Weight rows of a tile, threads and shared memory of a block, as in the source.
const ROWS: usize = 128;
const THREADS: u32 = 128;
const SHARED_BYTES: u32 = 74 * 1024;
/// Threads of a block that quantizes, and columns of each.
const QUANTIZE_THREADS: usize = 256;
const QUANTIZE_COLUMNS: usize = 16;

/// The kernels of one format.
#[derive(Clone, Debug)]
struct OfFormat {
    group: usize,
    quantize: Kernel,
    gate_up: Kernel,
    down: Kernel,
}

/// The kernels of this family, for the formats of one model.
#[derive(Clone, Debug)]
pub struct Int8Experts {
    linear: Linear,
    formats: BTreeMap<String, OfFormat>,
}

/// Where quantized rows are kept between kernels: as many bytes as the widest input has elements, or twice as many for rows
/// of four bits, which can be kept as BF16; and a scale for each 32 elements.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRows {
    /// Codes, `[rows, K]`, in the order of the source, or what is kept instead; aligned to 16.
    pub codes: Pointer<u8>,
    /// `[rows, K / group]`, or of rows of four bits `[rows]`.
    pub scales: Pointer<f32>,
}

impl Int8Experts {
    /// Slots of a tile: what the router is to be told.
    pub const TILE_ROWS: usize = 32;

    /// Loads the kernels for experts of these formats, which must be integers.
    pub fn new(device: &Device, formats: &[Format]) -> Result<Self, CudaError> {
        let mut of = BTreeMap::new();
        for &format in formats {
            let (Format::Int8 { group } | Format::Int4 { group }) = format else {
                let what = format!("{format:?}, only INT8 and INT4");
                return Err(CudaError::Unsupported { operation: "experts with activations of eight bits", what });
            };
            let suffix = format.suffix();
            let kernel = |name: String| device.kernel("experts_int8", &name);
            let kernels = OfFormat {
                group,
                quantize: kernel(format!("quantize_rows_{group}"))?,
                gate_up: kernel(format!("experts_int8_gate_up_{suffix}"))?,
                down: kernel(format!("experts_int8_down_{suffix}"))?,
            };
            kernels.gate_up.allow_shared(SHARED_BYTES)?;
            kernels.down.allow_shared(SHARED_BYTES)?;
            of.insert(suffix, kernels);
        }
        Ok(Self { linear: Linear::new(device)?, formats: of })
    }

    /// As [`super::Experts::gate_up`].
    ///
    /// # Safety
    /// As there, with tiles of [`TILE_ROWS`](Self::TILE_ROWS); `scratch` has room for the rows of `x`.
    pub unsafe fn gate_up(
        &self,
        act: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        shared: Option<&Strips>,
        slots: &Slots<'_>,
        scratch: QuantizedRows,
    ) -> Result<(), CudaError> {
        let of = self.of(weights)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.quantize(of, scratch, x, slots.rows, weights.cols)?;
            self.project(&of.gate_up, act, scratch, weights, slots)?;
            shared_gate_up(&self.linear, act, x, weights, shared, slots)
        }
    }

    /// As [`super::Experts::down`].
    ///
    /// # Safety
    /// As there, with tiles of [`TILE_ROWS`](Self::TILE_ROWS); `scratch` has room for the slots of `act`.
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
        let of = self.of(weights)?;
        // SAFETY: the caller's promise.
        unsafe {
            self.quantize(of, scratch, act, slots.count(), weights.cols)?;
            self.project(&of.down, parts, scratch, weights, slots)?;
            shared_down(&self.linear, parts, act, weights, shared, slots, stride)
        }
    }

    fn of(&self, weights: &Strips) -> Result<&OfFormat, CudaError> {
        self.formats.get(&weights.format.suffix()).ok_or_else(|| CudaError::Unsupported {
            operation: "experts with activations of eight bits",
            what: format!("{:?}, which was not loaded", weights.format),
        })
    }

    unsafe fn quantize(
        &self,
        of: &OfFormat,
        to: QuantizedRows,
        x: Pointer<bf16>,
        rows: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        assert!(cols.is_multiple_of(of.group), "{cols} columns in groups of {}", of.group);
        let pieces = rows * cols / QUANTIZE_COLUMNS;
        let shape = LaunchShape::new([pieces.div_ceil(QUANTIZE_THREADS) as u32, 1, 1], QUANTIZE_THREADS as u32);
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            of.quantize.launch(
                shape.overlapping(),
                &[argument(&to.codes), argument(&to.scales), argument(&x), argument(&(pieces as u64))],
            )
        }
    }

    unsafe fn project(
        &self,
        kernel: &Kernel,
        out: Pointer<bf16>,
        x: QuantizedRows,
        weights: &Strips,
        slots: &Slots<'_>,
    ) -> Result<(), CudaError> {
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
