//! Keys and values of one block, in every layer, as attention reads them.
//!
//! In f32 a layer is a [`Page`]. In BF16 it is what [`super::tiles`] multiplies with, packed once, when it is written:
//! half the memory, and nothing to convert however often it is read.

use minnow_common::BLOCK;

use super::Isa;
#[cfg(target_arch = "x86_64")]
use super::tiles::{Line, PackedShape, pack_layer};
use crate::ops::{Heads, Page};

/// Keys and values of one block in every layer.
#[derive(Clone, Debug)]
pub struct KvBlock {
    heads: Heads,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    /// `[layers, 2, kv heads, 32, dim]`, keys first.
    F32(Vec<f32>),
    /// `[layers]` of [`PackedShape`].
    #[cfg(target_arch = "x86_64")]
    Bf16(Vec<Line>),
}

/// Where keys and values lie in rows of something larger.
#[derive(Clone, Copy, Debug)]
pub struct KvRows<'a> {
    /// `[32, stride]`
    pub rows: &'a [f32],
    /// Length of a row.
    pub stride: usize,
    /// Where in a row the keys of all heads begin; then they follow each other.
    pub keys_at: usize,
    /// As `keys_at`, for values.
    pub values_at: usize,
}

impl KvBlock {
    /// Room for a block, all zero.
    #[must_use]
    pub fn new(isa: Isa, heads: Heads, layers: usize) -> Self {
        #[cfg(target_arch = "x86_64")]
        if isa.rounds_to_bf16() {
            let lines = layers * PackedShape::of(heads).layer_lines();
            return Self { heads, form: Form::Bf16(vec![Line::ZERO; lines]) };
        }
        Self { heads, form: Form::F32(vec![0.0; layers * 2 * heads.kv * BLOCK * heads.dim]) }
    }

    /// Bytes that a block takes.
    #[must_use]
    pub fn bytes(isa: Isa, heads: Heads, layers: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        if isa.rounds_to_bf16() {
            return layers * PackedShape::of(heads).layer_lines() * size_of::<Line>();
        }
        layers * 2 * heads.kv * BLOCK * heads.dim * size_of::<f32>()
    }

    /// Sets keys and values of a layer.
    ///
    /// # Panics
    /// If there is no such layer, or there are not 32 rows.
    pub fn write(&mut self, isa: Isa, layer: usize, from: KvRows<'_>) {
        let Heads { kv, dim, .. } = self.heads;
        assert_eq!(from.rows.len(), BLOCK * from.stride);
        match &mut self.form {
            Form::F32(values) => {
                let elements = kv * BLOCK * dim;
                let (keys, values) = values[2 * layer * elements..][..2 * elements].split_at_mut(elements);
                for (row, from_row) in from.rows.chunks_exact(from.stride).enumerate() {
                    for head in 0..kv {
                        let place = (head * BLOCK + row) * dim;
                        keys[place..][..dim].copy_from_slice(&from_row[from.keys_at + head * dim..][..dim]);
                        values[place..][..dim].copy_from_slice(&from_row[from.values_at + head * dim..][..dim]);
                    }
                }
            }
            #[cfg(target_arch = "x86_64")]
            Form::Bf16(lines) => {
                let count = PackedShape::of(self.heads).layer_lines();
                pack_layer(isa, &mut lines[layer * count..][..count], self.heads, from);
            }
        }
    }

    /// Copies everything into `out`, which has exactly [`Self::bytes`]: numbers as they are kept, little-endian.
    pub fn export(&self, out: &mut [u8]) {
        match &self.form {
            Form::F32(values) => {
                for (out, value) in out.as_chunks_mut().0.iter_mut().zip(values) {
                    *out = value.to_le_bytes();
                }
            }
            #[cfg(target_arch = "x86_64")]
            Form::Bf16(lines) => {
                for (out, value) in out.as_chunks_mut().0.iter_mut().zip(lines.iter().flat_map(Line::values)) {
                    *out = value.to_le_bytes();
                }
            }
        }
    }

    /// Undoes [`Self::export`].
    pub fn import(&mut self, bytes: &[u8]) {
        match &mut self.form {
            Form::F32(values) => {
                for (value, &bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                    *value = f32::from_le_bytes(bytes);
                }
            }
            #[cfg(target_arch = "x86_64")]
            Form::Bf16(lines) => {
                let values = lines.iter_mut().flat_map(Line::values_mut);
                for (value, &bytes) in values.zip(bytes.as_chunks().0) {
                    *value = u16::from_le_bytes(bytes);
                }
            }
        }
    }

    /// A layer in f32; `None` if it is kept in BF16.
    pub(super) fn page(&self, layer: usize) -> Option<Page<'_>> {
        match &self.form {
            Form::F32(values) => {
                let elements = self.heads.kv * BLOCK * self.heads.dim;
                let (keys, values) = values[2 * layer * elements..][..2 * elements].split_at(elements);
                Some(Page { keys, values })
            }
            #[cfg(target_arch = "x86_64")]
            Form::Bf16(_) => None,
        }
    }

    /// A layer in BF16; `None` if it is kept in f32.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn packed(&self, layer: usize) -> Option<&[Line]> {
        match &self.form {
            Form::F32(_) => None,
            Form::Bf16(lines) => {
                let count = PackedShape::of(self.heads).layer_lines();
                Some(&lines[layer * count..][..count])
            }
        }
    }
}
