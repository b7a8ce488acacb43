//! Where a code and a scale of row `r`, column `k` lie in the regions of each quantized encoding.
//! `docs/format-mnw.md` section 8.
//!
//! Positions are counted in codes: a position is a byte for 8-bit codes, and half a byte, low half first, for 4-bit
//! ones. In every layout columns `2i` and `2i + 1` are neighbours, so codes are moved in pairs.

use minnow_common::Encoding;

/// The order of codes and scales in an encoding.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// Row after row.
    RowMajor(Width),
    /// 8 x 16 tiles: lane `l` of 32 holds row `l / 4`, columns `2 (l % 4) + {0, 1, 8, 9}`.
    Mma(Width),
    /// 8 x 64 tiles of two registers: lane `l` holds row `l / 4`, eight columns from `32 register + 8 (l % 4)`.
    Nvfp4,
}

/// Bits of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    Byte,
    Nibble,
}

impl Order {
    /// # Panics
    /// For a floating encoding: a fault of the caller.
    pub(super) fn of(encoding: Encoding) -> Self {
        match encoding {
            Encoding::I8Sym => Self::RowMajor(Width::Byte),
            Encoding::I4Sym => Self::RowMajor(Width::Nibble),
            Encoding::I8Mma => Self::Mma(Width::Byte),
            Encoding::I4Mma => Self::Mma(Width::Nibble),
            Encoding::Nvfp4 => Self::Nvfp4,
            Encoding::Float(_) => unreachable!("floating elements have no codes"),
        }
    }

    pub(super) fn width(self) -> Width {
        match self {
            Self::RowMajor(width) | Self::Mma(width) => width,
            Self::Nvfp4 => Width::Nibble,
        }
    }

    /// Writes one row of codes, a byte each, into the region `data`.
    pub(super) fn store_codes(self, data: &mut [u8], row: usize, codes: &[u8]) {
        let start = self.row_start(codes.len(), row);
        for (pair, codes) in codes.as_chunks::<2>().0.iter().enumerate() {
            let position = start + self.column_offset(2 * pair);
            match self.width() {
                Width::Byte => data[position..position + 2].copy_from_slice(codes),
                Width::Nibble => data[position / 2] = codes[0] & 15 | codes[1] << 4,
            }
        }
    }

    /// Calls `put(column, code)` for every code of one row of `cols`; a nibble comes in the low half of a byte.
    pub(super) fn load_codes(self, data: &[u8], row: usize, cols: usize, mut put: impl FnMut(usize, u8)) {
        let start = self.row_start(cols, row);
        for col in (0..cols).step_by(2) {
            let position = start + self.column_offset(col);
            let [first, second] = match self.width() {
                Width::Byte => [data[position], data[position + 1]],
                Width::Nibble => [data[position / 2] & 15, data[position / 2] >> 4],
            };
            put(col, first);
            put(col + 1, second);
        }
    }

    /// Writes the scales of one row, in the order of its groups, into the region `scales`.
    pub(super) fn store_scales(self, scales: &mut [u8], row: usize, row_scales: &[u8]) {
        let bytes = self.scale_bytes();
        let groups = row_scales.len() / bytes;
        for (group, scale) in row_scales.chunks_exact(bytes).enumerate() {
            scales[bytes * self.scale_index(groups, row, group)..][..bytes].copy_from_slice(scale);
        }
    }

    /// Reads the scales of one row, in the order of its groups, from the region `scales`.
    pub(super) fn load_scales(self, scales: &[u8], row: usize, row_scales: &mut [u8]) {
        let bytes = self.scale_bytes();
        let groups = row_scales.len() / bytes;
        for (group, scale) in row_scales.chunks_exact_mut(bytes).enumerate() {
            scale.copy_from_slice(&scales[bytes * self.scale_index(groups, row, group)..][..bytes]);
        }
    }

    /// Position of the scale of `group` of `row`, counted in scales, in a matrix of `groups` groups a row.
    pub(super) fn scale_index(self, groups: usize, row: usize, group: usize) -> usize {
        match self {
            Self::RowMajor(_) => row * groups + group,
            Self::Mma(_) => (row / 8 * groups + group) * 8 + row % 8,
            // Four groups a row in a tile of 8 x 64.
            Self::Nvfp4 => row / 8 * groups * 8 + group / 4 * 32 + row % 8 * 4 + group % 4,
        }
    }

    /// Bytes of a stored scale: FP16 or E4M3.
    fn scale_bytes(self) -> usize {
        match self {
            Self::RowMajor(_) | Self::Mma(_) => 2,
            Self::Nvfp4 => 1,
        }
    }

    /// Position of column 0 of `row`.
    fn row_start(self, cols: usize, row: usize) -> usize {
        match self {
            Self::RowMajor(_) => row * cols,
            Self::Mma(_) => row / 8 * 8 * cols + row % 8 * 16,
            Self::Nvfp4 => row / 8 * 8 * cols + row % 8 * 32,
        }
    }

    /// Distance of column `col` from column 0 of its row.
    fn column_offset(self, col: usize) -> usize {
        match self {
            Self::RowMajor(_) => col,
            // A tile of 128 codes; a lane of four; its two halves are eight columns apart.
            Self::Mma(_) => col / 16 * 128 + col % 8 / 2 * 4 + col % 16 / 8 * 2 + col % 2,
            // A tile of 512 codes, a register of 256 for 32 columns; those of a row follow each other.
            Self::Nvfp4 => col / 64 * 512 + col % 64 / 32 * 256 + col % 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mma_tile_looks_as_the_specification_shows_it() {
        let mut data = [0; 128];
        for row in 0..8 {
            let codes: Vec<u8> = (0..16).map(|col| row * 16 + col).collect();
            Order::Mma(Width::Byte).store_codes(&mut data, usize::from(row), &codes);
        }
        assert_eq!(data[..16], [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
        assert_eq!(data[16..20], [0x10, 0x11, 0x18, 0x19]);
        assert_eq!(data[124..], [0x76, 0x77, 0x7e, 0x7f]);
    }

    #[test]
    fn positions_are_the_formulas_of_the_specification() {
        let (rows, cols) = (24, 192);
        for row in 0..rows {
            for col in 0..cols {
                let mma = ((row / 8 * (cols / 16) + col / 16) * 32 + row % 8 * 4 + col % 8 / 2) * 4
                    + col % 16 / 8 * 2
                    + col % 2;
                let order = Order::Mma(Width::Nibble);
                assert_eq!(order.row_start(cols, row) + order.column_offset(col), mma);
                let byte = (row / 8 * (cols / 64) + col / 64) * 256
                    + (col % 64 / 32 * 32 + row % 8 * 4 + col % 32 / 8) * 4
                    + col % 8 / 2;
                let order = Order::Nvfp4;
                assert_eq!(order.row_start(cols, row) + order.column_offset(col), 2 * byte + col % 2);
                let scale = (row / 8 * (cols / 64) + col / 64) * 32 + row % 8 * 4 + col % 64 / 16;
                assert_eq!(order.scale_index(cols / 16, row, col / 16), scale);
            }
        }
    }
}
