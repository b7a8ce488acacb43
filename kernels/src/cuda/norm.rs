//! RMS norm with what comes before it: the residual addition, or the sum over a row's experts. `cu/norm`.

use half::bf16;

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};

/// A row is kept in the registers of one block, eight values a thread.
const DIM_MAX: usize = 4096;

/// The kernels of this family.
#[derive(Clone, Debug)]
pub struct Norm {
    residual_norm: Kernel,
    combine_norm: Kernel,
}

/// What a norm is made of: `out = x / sqrt(mean(x^2) + eps) * weight`, row by row.
#[derive(Clone, Copy, Debug)]
pub struct NormShape {
    /// Rows.
    pub rows: usize,
    /// Width of a row.
    pub dim: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl NormShape {
    fn launch(&self) -> LaunchShape {
        LaunchShape::new([self.rows as u32, 1, 1], self.dim.div_ceil(8).next_multiple_of(32) as u32).overlapping()
    }
}

/// Outputs of experts, to be summed row by row.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// `[rows, stride, dim]`: the routed experts of a row in the order of `weights`, then the shared one, if any.
    pub parts: Pointer<bf16>,
    /// `[rows, slots]`
    pub weights: Pointer<f32>,
    /// Routed experts of a row.
    pub slots: usize,
    /// `slots`, or one more with a shared expert.
    pub stride: usize,
}

impl Norm {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let kernel = |name| device.kernel("norm", name);
        Ok(Self { residual_norm: kernel("residual_norm")?, combine_norm: kernel("combine_norm")? })
    }

    /// Whether rows of this width can be normalised.
    pub fn check(dim: usize) -> Result<(), CudaError> {
        if dim.is_multiple_of(8) && dim <= DIM_MAX {
            return Ok(());
        }
        let what = format!("rows of {dim}, only multiples of 8 up to {DIM_MAX}");
        Err(CudaError::Unsupported { operation: "a norm", what })
    }

    /// `x += y`, then `out = norm(x)`. Null `y`: nothing is added; null `out`: nothing is normalised.
    /// `x`, `y`, `out`: `[rows, dim]`; `weight: [dim]`.
    ///
    /// # Safety
    /// The pointers are of that many elements, aligned to 16 bytes; `out` overlaps neither `x` nor `y`.
    pub unsafe fn residual_norm(
        &self,
        x: Pointer<bf16>,
        y: Pointer<bf16>,
        weight: Pointer<bf16>,
        out: Pointer<bf16>,
        shape: NormShape,
    ) -> Result<(), CudaError> {
        let launch = shape.launch();
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.residual_norm.launch(
                launch,
                &[
                    argument(&x),
                    argument(&y),
                    argument(&weight),
                    argument(&out),
                    argument(&(shape.dim as i32)),
                    argument(&shape.eps),
                ],
            )
        }
    }

    /// Adds the weighted sum of a row's `parts` to `x`, then `out = norm(x)`. Null `out`: nothing is normalised.
    ///
    /// # Safety
    /// As [`residual_norm`](Self::residual_norm); `parts` as its fields say.
    pub unsafe fn combine_norm(
        &self,
        x: Pointer<bf16>,
        parts: &Parts,
        weight: Pointer<bf16>,
        out: Pointer<bf16>,
        shape: NormShape,
    ) -> Result<(), CudaError> {
        let launch = shape.launch();
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.combine_norm.launch(
                launch,
                &[
                    argument(&x),
                    argument(&parts.parts),
                    argument(&parts.weights),
                    argument(&weight),
                    argument(&out),
                    argument(&(parts.slots as i32)),
                    argument(&(parts.stride as i32)),
                    argument(&(shape.dim as i32)),
                    argument(&shape.eps),
                ],
            )
        }
    }
}
