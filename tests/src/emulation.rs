//! The native kernel of experts with activations of four bits, on the host: `tests/cuda/emulation.cpp`.

use minnow_common::Encoding;
use minnow_kernels::matrix::WeightMatrix;

/// Bytes of a record of 128 columns: `Fp4Record` of `kernels/cu/common/fp4.cuh`.
const RECORD_BYTES: usize = 80;
const RECORD_COLUMNS: usize = 128;
/// Rows of a strip, columns of its blocks, and their bytes.
const STRIP: usize = 16;
const BLOCK_COLUMNS: usize = 64;
const BLOCK_BYTES: usize = 576;

unsafe extern "C" {
    fn fp4_rows(rounded: *mut u16, records: *mut u8, scales: *mut f32, x: *const u16, rows: i32, k: i32);
    fn fp4_strips(
        target: *mut u32,
        upper: *const u8,
        upper_scales: *const u8,
        lower: *const u8,
        lower_scales: *const u8,
        n: i32,
        k: i32,
        strips: i32,
        stride: i32,
        lower_row: i32,
    );
    fn fp4_product(
        out: *mut f32,
        records: *const u8,
        row_scales: *const f32,
        rows: i32,
        w: *const u8,
        strips: i32,
        k: i32,
        upper_scale: f32,
        lower_scale: f32,
    );
}

/// Sixteen bytes of strips, aligned as the kernel's loads want them.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Words([u32; 4]);

/// A matrix of NVFP4, or a pair, in the strips of the native kernel.
pub struct CodeStrips {
    words: Vec<Words>,
    strips: usize,
    cols: usize,
    global_scales: [f32; 2],
}

impl CodeStrips {
    /// One matrix.
    #[must_use]
    pub fn alone(matrix: &WeightMatrix<'_>) -> Self {
        Self::new([matrix, matrix], matrix.rows().div_ceil(STRIP), 16, 8)
    }

    /// Gate and up, eight rows of one, eight of the other.
    #[must_use]
    pub fn pair(gate: &WeightMatrix<'_>, up: &WeightMatrix<'_>) -> Self {
        Self::new([gate, up], gate.rows().div_ceil(8), 8, 0)
    }

    fn new([upper, lower]: [&WeightMatrix<'_>; 2], strips: usize, stride: i32, lower_row: i32) -> Self {
        for matrix in [upper, lower] {
            assert!(matrix.encoding() == Encoding::Nvfp4 && matrix.cols().is_multiple_of(RECORD_COLUMNS));
            assert_eq!((matrix.rows(), matrix.cols()), (upper.rows(), upper.cols()));
        }
        let cols = upper.cols();
        let mut words = vec![Words([u32::MAX; 4]); strips * (cols / BLOCK_COLUMNS) * BLOCK_BYTES / size_of::<Words>()];
        // SAFETY: room for the blocks of all strips; `WeightMatrix` has the bytes of its shape, and the function reads no
        // rows beyond them.
        unsafe {
            fp4_strips(
                words.as_mut_ptr().cast(),
                upper.data().as_ptr(),
                upper.scales().as_ptr(),
                lower.data().as_ptr(),
                lower.scales().as_ptr(),
                upper.rows() as i32,
                cols as i32,
                strips as i32,
                stride,
                lower_row,
            );
        }
        Self { words, strips, cols, global_scales: [upper, lower].map(|matrix| matrix.global_scale()) }
    }

    /// All of it, in order.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|words| words.0).flat_map(u32::to_le_bytes).collect()
    }
}

/// Rows as the kernels of `cu/moe/fp4_rows.cu` make them.
#[derive(Clone, Debug)]
pub struct Rows {
    /// What they are replaced by where codes are not multiplied, `[rows, cols]` BF16 bits.
    pub rounded: Vec<u16>,
    /// Codes and their scales, in the order of the kernels.
    pub records: Vec<u8>,
    /// One of each row.
    pub scales: Vec<f32>,
    cols: usize,
}

impl Rows {
    /// Quantizes `x: [rows, cols]`, BF16 bits.
    ///
    /// # Panics
    /// If rows are not whole records.
    #[must_use]
    pub fn new(x: &[u16], cols: usize) -> Self {
        assert!(cols.is_multiple_of(RECORD_COLUMNS) && x.len().is_multiple_of(cols));
        let rows = x.len() / cols;
        let mut made = Self {
            rounded: vec![0; x.len()],
            records: vec![0xff; x.len() / RECORD_COLUMNS * RECORD_BYTES],
            scales: vec![0.0; rows],
            cols,
        };
        let Self { rounded, records, scales, .. } = &mut made;
        // SAFETY: arrays of the stated sizes, which the function stays in.
        unsafe {
            fp4_rows(
                rounded.as_mut_ptr(),
                records.as_mut_ptr(),
                scales.as_mut_ptr(),
                x.as_ptr(),
                rows as i32,
                cols as i32,
            );
        }
        made
    }

    /// The products with strips, `[rows, rows of the strips]`, before they are rounded to BF16.
    ///
    /// # Panics
    /// If the strips have another number of columns.
    #[must_use]
    pub fn product(&self, with: &CodeStrips) -> Vec<f32> {
        assert_eq!(with.cols, self.cols);
        let mut out = vec![0.0; self.scales.len() * with.strips * STRIP];
        let [upper_scale, lower_scale] = with.global_scales;
        // SAFETY: arrays of the stated sizes, which the function stays in.
        unsafe {
            fp4_product(
                out.as_mut_ptr(),
                self.records.as_ptr(),
                self.scales.as_ptr(),
                self.scales.len() as i32,
                with.words.as_ptr().cast(),
                with.strips as i32,
                self.cols as i32,
                upper_scale,
                lower_scale,
            );
        }
        out
    }
}
