//! Weight matrices in device memory: their layout, and making it of what a checkpoint stores. `cu/gemm/strips.cu`.
//!
//! Every matrix that is multiplied by activations lies in *strips*, whatever its format: `cu/common/strips.cuh` has the
//! order of bytes. It is laid out once, while it is loaded, in place of the stored order: there is one copy.

use minnow_common::{Encoding, FloatType};

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};

/// Rows of a strip.
const STRIP: usize = 16;
/// Threads of a block, as in the source.
const THREADS: u32 = 256;

/// How the elements of a matrix in strips are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// BF16.
    Bf16,
    /// 8-bit integers with an FP16 scale for each group of columns.
    Int8 {
        /// Columns of a group: 32, 64 or 128.
        group: usize,
    },
    /// 4-bit integers, likewise.
    Int4 {
        /// Columns of a group: 32, 64 or 128.
        group: usize,
    },
    /// E2M1 with a scale for 16 columns and one for the matrix, in the order of the operands that it is widened to.
    Nvfp4,
    /// The same, in the order of the operands that it is itself. `cu/common/fp4.cuh`.
    Nvfp4Codes,
}

impl Format {
    /// The format that keeps what `encoding` stores, with `group` columns a scale.
    pub fn of(encoding: Encoding, group: usize) -> Result<Self, CudaError> {
        match (encoding, group) {
            (Encoding::Float(FloatType::Bf16), _) => Ok(Self::Bf16),
            (Encoding::I8Sym | Encoding::I8Mma, 32 | 64 | 128) => Ok(Self::Int8 { group }),
            (Encoding::I4Sym | Encoding::I4Mma, 32 | 64 | 128) => Ok(Self::Int4 { group }),
            (Encoding::Nvfp4, _) => Ok(Self::Nvfp4),
            _ => unsupported(format!(
                "{encoding} weights in groups of {group}, only bf16, nvfp4, and groups of 32, 64, 128"
            )),
        }
    }

    /// The format for GPUs that multiply four-bit numbers.
    #[must_use]
    pub fn in_codes(self) -> Self {
        if self == Self::Nvfp4 { Self::Nvfp4Codes } else { self }
    }

    /// Whether a matrix of `rows` rows of `cols` columns can be kept so and multiplied.
    pub fn check(self, rows: usize, cols: usize) -> Result<(), CudaError> {
        if rows.is_multiple_of(8) && cols.is_multiple_of(128) {
            return Ok(());
        }
        unsupported(format!("a matrix of {rows} x {cols}, only multiples of 8 x 128"))
    }

    /// Columns of a block: codes, then their scales.
    fn unit(self) -> usize {
        match self {
            Self::Bf16 | Self::Nvfp4 | Self::Nvfp4Codes => 64,
            Self::Int8 { group } | Self::Int4 { group } => group.max(64),
        }
    }

    /// Bytes of `rows` rows of `cols` columns, padding included. Several matrices of the same shape follow each other.
    #[must_use]
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> usize {
        let unit = self.unit();
        let block = match self {
            Self::Bf16 => unit * 32,
            Self::Int8 { group } => unit * 16 + unit / group * 32,
            Self::Int4 { group } => unit * 8 + unit / group * 32,
            Self::Nvfp4 | Self::Nvfp4Codes => unit * 8 + 64,
        };
        rows.div_ceil(STRIP) * (cols / unit) * block
    }

    /// How kernels of this format are called.
    pub(super) fn suffix(self) -> String {
        match self {
            Self::Bf16 => "bf16".to_owned(),
            Self::Int8 { group } => format!("int8_{group}"),
            Self::Int4 { group } => format!("int4_{group}"),
            Self::Nvfp4 => "nvfp4".to_owned(),
            Self::Nvfp4Codes => "nvfp4_codes".to_owned(),
        }
    }

    fn group(self) -> usize {
        match self {
            Self::Bf16 | Self::Nvfp4 | Self::Nvfp4Codes => 16,
            Self::Int8 { group } | Self::Int4 { group } => group,
        }
    }
}

fn unsupported<T>(what: String) -> Result<T, CudaError> {
    Err(CudaError::Unsupported { operation: "a matrix product", what })
}

/// One matrix in strips, or several of the same shape, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Strips {
    /// How elements are kept.
    pub format: Format,
    /// Output features. Where gate and up are one matrix, those of both: eight rows of one, eight of the other.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// [`Format::matrix_bytes`] for each matrix, aligned to 16.
    pub data: Pointer<u8>,
    /// NVFP4's matrix-wide scales: one for each matrix, two (gate's, up's) where it is a pair. Null for other formats.
    pub global_scales: Pointer<f32>,
}

/// A matrix as it is stored, its bytes in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    /// Elements or codes, in the order of the encoding; aligned to 4.
    pub data: Pointer<u8>,
    /// Scales, in the order of the encoding; aligned to 2. Null for BF16.
    pub scales: Pointer<u8>,
}

/// The kernels that lay matrices out.
#[derive(Clone, Debug)]
pub struct Relayout {
    bf16: Kernel,
    int8: Kernel,
    int4: Kernel,
    nvfp4: Kernel,
    nvfp4_codes: Kernel,
}

impl Relayout {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let kernel = |name| device.kernel("strips", name);
        Ok(Self {
            bf16: kernel("strips_bf16")?,
            int8: kernel("strips_int8")?,
            int4: kernel("strips_int4")?,
            nvfp4: kernel("strips_nvfp4")?,
            nvfp4_codes: kernel("strips_nvfp4_codes")?,
        })
    }

    /// Lays out the matrix `stored`, `[rows, cols]` in `encoding`, at `target`, in a format that keeps it.
    ///
    /// # Safety
    /// `stored` holds such a matrix; `target` has [`Format::matrix_bytes`] of it, aligned to 16, elsewhere.
    pub unsafe fn alone(
        &self,
        target: Pointer<u8>,
        stored: Stored,
        encoding: Encoding,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        // Row g of strip s is row 16 s + g, and row g + 8 is row 16 s + 8 + g.
        // SAFETY: the caller's promise.
        unsafe { self.run(target, [stored, stored], encoding, format, rows, cols, rows.div_ceil(STRIP), 16, 8) }
    }

    /// Lays out `gate` and `up`, each `[rows, cols]` in `encoding`, as one matrix of `2 * rows` rows at `target`.
    ///
    /// # Safety
    /// As [`alone`](Self::alone), with [`Format::matrix_bytes`] of `2 * rows` rows.
    #[expect(clippy::too_many_arguments, reason = "two matrices and what they have in common")]
    pub unsafe fn pair(
        &self,
        target: Pointer<u8>,
        gate: Stored,
        up: Stored,
        encoding: Encoding,
        format: Format,
        rows: usize,
        cols: usize,
    ) -> Result<(), CudaError> {
        // Row g of strip s is row 8 s + g of gate, and row g + 8 is that row of up.
        // SAFETY: the caller's promise.
        unsafe { self.run(target, [gate, up], encoding, format, rows, cols, rows.div_ceil(8), 8, 0) }
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the kernels")]
    unsafe fn run(
        &self,
        target: Pointer<u8>,
        [upper, lower]: [Stored; 2],
        encoding: Encoding,
        format: Format,
        rows: usize,
        cols: usize,
        strips: usize,
        stride: i32,
        lower_row: i32,
    ) -> Result<(), CudaError> {
        let keeps = match Format::of(encoding, format.group())? {
            Format::Nvfp4 => matches!(format, Format::Nvfp4 | Format::Nvfp4Codes),
            other => other == format,
        };
        assert!(keeps, "{encoding} in {format:?}");
        format.check(rows, cols)?;
        let kernel = match format {
            Format::Bf16 => &self.bf16,
            Format::Int8 { .. } => &self.int8,
            Format::Int4 { .. } => &self.int4,
            Format::Nvfp4 => &self.nvfp4,
            Format::Nvfp4Codes => &self.nvfp4_codes,
        };
        let words = (format.matrix_bytes(STRIP, cols) / 4) as u32;
        let tiled = i32::from(matches!(encoding, Encoding::I8Mma | Encoding::I4Mma));
        let numbers = [rows as i32, cols as i32, format.group() as i32, stride, lower_row, tiled];
        // SAFETY: the parameters of the source; the rest is the caller's promise.
        unsafe {
            kernel.launch(
                LaunchShape::new([words.div_ceil(THREADS), strips as u32, 1], THREADS),
                &[
                    argument(&target),
                    argument(&upper.data),
                    argument(&upper.scales),
                    argument(&lower.data),
                    argument(&lower.scales),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                    argument(&numbers[2]),
                    argument(&numbers[3]),
                    argument(&numbers[4]),
                    argument(&numbers[5]),
                ],
            )
        }
    }
}
