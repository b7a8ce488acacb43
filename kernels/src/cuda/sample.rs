//! The best tokens of each row, from what the head kept of each tile of the vocabulary. `cu/sample`.

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};

/// The kernel of this family.
#[derive(Clone, Debug)]
pub struct Sampler {
    best_tokens: Kernel,
}

/// What is known of each tile of a row's logits, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct TileBest {
    /// The four best tokens of a tile, `[rows, tiles, 4]`; missing ones are `u32::MAX`.
    pub tokens: Pointer<u32>,
    /// Their logits, best first, `[rows, tiles, 4]`; of missing ones minus infinity.
    pub logits: Pointer<f32>,
    /// Sum over the tile of `exp(logit - best of the tile)`, without logits of minus infinity; `[rows, tiles]`.
    pub sums: Pointer<f32>,
}

/// The four best tokens of each row, `[rows, 4]` each, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct RowBest {
    /// Ids.
    pub tokens: Pointer<u32>,
    /// Logits.
    pub logits: Pointer<f32>,
    /// Softmax probabilities at temperature 1 over the whole row.
    pub confidences: Pointer<f32>,
}

impl Sampler {
    /// Loads the kernel.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self { best_tokens: device.kernel("sample", "best_tokens")? })
    }

    /// Merges the tiles of each row.
    ///
    /// # Safety
    /// The pointers are of the sizes their types state, and each row has four tokens or more.
    pub unsafe fn best_tokens(
        &self,
        out: &RowBest,
        tiles_best: &TileBest,
        rows: usize,
        tiles: usize,
    ) -> Result<(), CudaError> {
        let launch = LaunchShape::new([rows as u32, 1, 1], 128).overlapping();
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.best_tokens.launch(
                launch,
                &[
                    argument(&tiles_best.tokens),
                    argument(&tiles_best.logits),
                    argument(&tiles_best.sums),
                    argument(&out.tokens),
                    argument(&out.logits),
                    argument(&out.confidences),
                    argument(&(tiles as i32)),
                ],
            )
        }
    }
}
