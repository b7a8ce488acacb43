//! Which experts each row uses, and the rows of each expert in order. `cu/route`.

use minnow_common::{BLOCK, Routing};

use super::device::{Argument, CudaError, Device, Kernel, LaunchShape, Pointer, argument};
use crate::ops::RouterRules;

/// A thread for each expert.
const EXPERTS_MAX: usize = 256;
const THREADS: u32 = 256;
/// Threads of a block that chooses: a warp for each row.
const CHOOSE_THREADS: u32 = 1024;

/// The kernels of this family.
#[derive(Clone, Debug)]
pub struct Router {
    choose: Kernel,
    order: Kernel,
}

/// What the router makes of a batch, in device memory; `slots = rows * experts per token`.
#[derive(Clone, Copy, Debug)]
pub struct Choices {
    /// Experts of each row by descending biased score, `[rows, k]`.
    pub ids: Pointer<u32>,
    /// Their weights, `[rows, k]`.
    pub weights: Pointer<f32>,
    /// Which rows of each block chose an expert, a bit a row: `[rows / 32, experts]`.
    pub masks: Pointer<u32>,
    /// The row of each slot; the slots of an expert follow each other. `[slots]`
    pub slot_rows: Pointer<u32>,
    /// Where each slot's result goes: `row * stride + place in ids`. `[slots]`
    pub slot_parts: Pointer<u32>,
    /// `(expert, first slot, slots, 0)`, experts ascending: [`tiles_max`] entries at most.
    pub tiles: Pointer<[u32; 4]>,
    /// How many tiles there are.
    pub tile_count: Pointer<u32>,
}

impl Choices {
    /// `Routes` of the experts' kernels, member by member.
    pub(super) fn routes(&self) -> [Argument<'_>; 4] {
        [argument(&self.tiles), argument(&self.tile_count), argument(&self.slot_rows), argument(&self.slot_parts)]
    }
}

/// Tiles there can be at most: every expert may have one that is not full, and no more experts are used than slots.
#[must_use]
pub fn tiles_max(slots: usize, experts: usize, tile_rows: usize) -> usize {
    slots / tile_rows + experts.min(slots)
}

impl Router {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let choose = device.kernel("route", "choose")?;
        choose.allow_shared(Self::shared_bytes(EXPERTS_MAX))?;
        Ok(Self { choose, order: device.kernel("route", "order")? })
    }

    /// Whether the kernels can choose by these rules.
    pub fn check(experts: usize, rules: &RouterRules) -> Result<(), CudaError> {
        if experts <= EXPERTS_MAX && rules.experts_per_token <= BLOCK {
            return Ok(());
        }
        let what = format!("{} of {experts} experts, only up to {BLOCK} of {EXPERTS_MAX}", rules.experts_per_token);
        Err(CudaError::Unsupported { operation: "routing", what })
    }

    fn shared_bytes(experts: usize) -> u32 {
        (BLOCK * experts.next_multiple_of(32) * size_of::<f32>() + BLOCK * EXPERTS_MAX * size_of::<u16>()) as u32
    }

    /// Chooses experts for `rows` rows, whole blocks, by `logits: [rows, experts]` and `bias: [experts]`.
    ///
    /// # Safety
    /// The pointers are of the sizes above and in [`Choices`]; [`check`](Self::check) found nothing.
    pub unsafe fn choose(
        &self,
        choices: &Choices,
        logits: Pointer<f32>,
        bias: Pointer<f32>,
        rules: &RouterRules,
        rows: usize,
        experts: usize,
    ) -> Result<(), CudaError> {
        let (capacity, groups, kept) = match rules.routing {
            Routing::Block { capacity } => (capacity, 0, 0),
            Routing::Groups { groups, kept } => (0, groups, kept),
        };
        let launch = LaunchShape::new([(rows / BLOCK) as u32, 1, 1], CHOOSE_THREADS);
        let numbers = [experts, rules.experts_per_token, capacity, groups, kept].map(|number| number as i32);
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.choose.launch(
                launch.shared(Self::shared_bytes(experts)).overlapping(),
                &[
                    argument(&logits),
                    argument(&bias),
                    argument(&choices.ids),
                    argument(&choices.weights),
                    argument(&choices.masks),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                    argument(&rules.scale),
                    argument(&numbers[2]),
                    argument(&numbers[3]),
                    argument(&numbers[4]),
                ],
            )
        }
    }

    /// Lists the rows of each expert after [`choose`](Self::choose), in tiles of up to `tile_rows`, for results at
    /// `row * stride + place`.
    ///
    /// # Safety
    /// As [`choose`](Self::choose), which has filled `ids` and `masks` for these rows.
    pub unsafe fn order(
        &self,
        choices: &Choices,
        rules: &RouterRules,
        rows: usize,
        experts: usize,
        stride: usize,
        tile_rows: usize,
    ) -> Result<(), CudaError> {
        let launch = LaunchShape::new([(rows / BLOCK) as u32, 1, 1], THREADS).overlapping();
        let numbers = [experts, rules.experts_per_token, stride, tile_rows].map(|number| number as i32);
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.order.launch(
                launch,
                &[
                    argument(&choices.ids),
                    argument(&choices.masks),
                    argument(&choices.slot_rows),
                    argument(&choices.slot_parts),
                    argument(&choices.tiles),
                    argument(&choices.tile_count),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                    argument(&numbers[2]),
                    argument(&numbers[3]),
                ],
            )
        }
    }
}
