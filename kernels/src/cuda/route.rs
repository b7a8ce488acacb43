//! Which experts each row uses, and the rows of each expert in order. `cu/route`.

use minnow_common::{BLOCK, Routing};

use super::device::{Argument, CudaError, Device, Kernel, LaunchShape, Pointer, argument};
use crate::ops::RouterRules;

/// A thread for each expert.
const EXPERTS_MAX: usize = 256;
const THREADS: u32 = 256;
/// Threads of a block that chooses: a warp for each row.
const CHOOSE_THREADS: u32 = 1024;

/// Blocks of threads that choose together on Hopper, and the largest batch for which they do: of more, each rank alone.
const CLUSTER: usize = 8;
const TOGETHER_MAX: usize = 8;

/// The kernels of this family.
#[derive(Clone, Debug)]
pub struct Router {
    choose: Kernel,
    order: Kernel,
    /// Does what both do, for Hopper.
    choose_block: Option<Kernel>,
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

/// Tiles there can be at most for `blocks` blocks: every expert in use may have one that is not full.
#[must_use]
pub fn tiles_max(rules: &RouterRules, blocks: usize, experts: usize, tile_rows: usize) -> usize {
    let slots = blocks * BLOCK * rules.experts_per_token;
    let used = match rules.routing {
        Routing::Block { capacity } => capacity.saturating_mul(blocks),
        Routing::Groups { .. } => slots,
    };
    slots / tile_rows + used.min(slots).min(experts)
}

impl Router {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let choose = device.kernel("route", "choose")?;
        choose.allow_shared(Self::shared_bytes(EXPERTS_MAX))?;
        let hopper = device.has_module("route_sm90a")?;
        let choose_block = hopper.then(|| device.kernel("route_sm90a", "choose_block")).transpose()?;
        Ok(Self { choose, order: device.kernel("route", "order")?, choose_block })
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

    /// [`choose`](Self::choose), then [`order`](Self::order), in as few kernels as this GPU has for it; the same bits.
    ///
    /// # Safety
    /// As both.
    #[expect(clippy::too_many_arguments, reason = "the parameters of the kernels")]
    pub unsafe fn route(
        &self,
        choices: &Choices,
        logits: Pointer<f32>,
        bias: Pointer<f32>,
        rules: &RouterRules,
        rows: usize,
        experts: usize,
        stride: usize,
        tile_rows: usize,
    ) -> Result<(), CudaError> {
        let blocks = rows / BLOCK;
        let together = self.choose_block.as_ref().filter(|_| blocks <= TOGETHER_MAX);
        let (Some(choose_block), Routing::Block { capacity }) = (together, rules.routing) else {
            // SAFETY: the caller's promise.
            unsafe {
                self.choose(choices, logits, bias, rules, rows, experts)?;
                return self.order(choices, rules, rows, experts, stride, tile_rows);
            }
        };
        let launch = LaunchShape::new([(CLUSTER * blocks) as u32, 1, 1], THREADS).overlapping();
        let numbers = [experts, rules.experts_per_token, capacity, stride, tile_rows].map(|number| number as i32);
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            choose_block.launch(
                launch,
                &[
                    argument(&logits),
                    argument(&bias),
                    argument(&choices.ids),
                    argument(&choices.weights),
                    argument(&choices.masks),
                    argument(&choices.slot_rows),
                    argument(&choices.slot_parts),
                    argument(&choices.tiles),
                    argument(&choices.tile_count),
                    argument(&numbers[0]),
                    argument(&numbers[1]),
                    argument(&rules.scale),
                    argument(&numbers[2]),
                    argument(&numbers[3]),
                    argument(&numbers[4]),
                ],
            )?;
            // The kernel has done it for a batch of one.
            if blocks > 1 { self.order(choices, rules, rows, experts, stride, tile_rows) } else { Ok(()) }
        }
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
