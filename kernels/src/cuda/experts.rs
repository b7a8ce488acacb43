//! The feed-forward of the chosen experts, and of the shared one beside them. `cu/moe`.
//!
//! As in [`super::Linear`], few slots and many have kernels of their own, which give the same bits.

use std::collections::BTreeMap;

use half::bf16;

use super::device::{CudaError, Device, LaunchShape, Pointer, argument};
use super::linear::{Linear, TileKernel};
use super::route::Choices;
use super::strips::{Format, Strips};

/// The shared expert's blocks beside the others: weight rows and rows of activations.
const SHARED_TILE: [usize; 2] = [128, 32];
/// Slots of a tile.
const FEW: usize = 32;
/// Rows of activations up to which most tiles are small.
const FEWEST_ROWS: usize = 64;
const MANY: usize = 64;
const WIDE: usize = 160;
/// Weight rows of a tile, but for some of the wide ones.
const ROWS: usize = 128;
/// Shared memory of a block, as the sources have it.
const ANY_SHARED_BYTES: u32 = 99 * 1024 - 512;
const FEW_SHARED_BYTES: u32 = 75 * 1024;
const WIDE_SHARED_BYTES: u32 = 225 * 1024;

/// The kernels of one format.
#[derive(Clone, Debug)]
struct OfFormat {
    fewest: [TileKernel; 2],
    few: [TileKernel; 2],
    many: [TileKernel; 2],
}

/// The kernels of this family, for the formats of one model.
#[derive(Clone, Debug)]
pub struct Experts {
    linear: Linear,
    formats: BTreeMap<String, OfFormat>,
    /// Whether the kernels are Hopper's.
    hopper: bool,
    multiprocessors: usize,
}

/// Which slots there are, and how they are divided: [`super::Router::order`] fills it with tiles of
/// [`Experts::tile_rows`] slots.
#[derive(Clone, Copy, Debug)]
pub struct Slots<'a> {
    /// In device memory.
    pub choices: &'a Choices,
    /// The most tiles there can be: [`super::tiles_max`].
    pub tiles_max: usize,
    /// Slots of a tile.
    pub tile_rows: usize,
    /// Rows of activations.
    pub rows: usize,
    /// Experts a row has: there are `rows` times as many slots.
    pub experts_per_token: usize,
}

impl Slots<'_> {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.rows * self.experts_per_token
    }
}

/// Which of the two products.
#[derive(Clone, Copy)]
enum Projection {
    GateUp,
    Down,
}

impl Experts {
    /// Loads the kernels for experts of these formats.
    pub fn new(device: &Device, formats: &[Format]) -> Result<Self, CudaError> {
        let hopper = device.has_module("experts_few_sm90a")? && device.has_module("experts_wide_sm90a")?;
        let mut of = BTreeMap::new();
        for &format in formats {
            let suffix = format.suffix();
            // As `Plan` in the source: integers keep two sums, and `down` has many rows.
            let wide_rows = |projection: &str| match format {
                Format::Bf16 | Format::Nvfp4 if projection == "gate_up" => 2 * ROWS,
                _ => ROWS,
            };
            let load = |module: &str, width: &str, projection: &str, tile, threads, shared_bytes| {
                let name = format!("experts_{width}_{projection}_{suffix}");
                TileKernel::load(device, module, &name, tile, threads, shared_bytes)
            };
            // Of the few kernels: four warps that multiply, and those that bring.
            let is_int4 = matches!(format, Format::Int4 { .. });
            let few_threads = if is_int4 { 160 } else { 192 };
            let fewest =
                |projection: &str| load("experts_few_sm90a", "fewest", projection, [ROWS, FEW], 192, FEW_SHARED_BYTES);
            let few = |projection: &str| match hopper {
                true => load("experts_few_sm90a", "few", projection, [ROWS, FEW], few_threads, FEW_SHARED_BYTES),
                false => load("experts", "few", projection, [ROWS, FEW], 128, ANY_SHARED_BYTES),
            };
            let many = |projection: &str| match hopper {
                true => {
                    let tile = [wide_rows(projection), WIDE];
                    load("experts_wide_sm90a", "wide", projection, tile, 384, WIDE_SHARED_BYTES)
                }
                false => load("experts", "many", projection, [ROWS, MANY], 128, ANY_SHARED_BYTES),
            };
            let kernels = OfFormat {
                fewest: match hopper && is_int4 {
                    true => [fewest("gate_up")?, fewest("down")?],
                    false => [few("gate_up")?, few("down")?],
                },
                few: [few("gate_up")?, few("down")?],
                many: [many("gate_up")?, many("down")?],
            };
            of.insert(suffix, kernels);
        }
        let multiprocessors = device.properties().multiprocessors as usize;
        Ok(Self { linear: Linear::new(device)?, formats: of, hopper, multiprocessors })
    }

    /// Slots of a tile for `slots` slots of `experts` experts: what the router is to be told.
    #[must_use]
    pub fn tile_rows(&self, slots: usize, experts: usize) -> usize {
        match slots / experts {
            0..40 => FEW,
            _ if self.hopper => WIDE,
            _ => MANY,
        }
    }

    /// `act[s] = silu(gate x) * (up x)` for each slot, by its expert, then for each row by the shared expert.
    /// `x: [rows, K]`, `act: [slots + rows, N / 2]`; without `shared`, only the slots' part is written.
    ///
    /// # Safety
    /// The pointers are of that many elements, aligned to 16 bytes, and do not overlap; `weights` (all experts, as pairs)
    /// and `shared` (a BF16 pair) are as their fields say; `slots` describes what a router on this device made.
    pub unsafe fn gate_up(
        &self,
        act: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        shared: Option<&Strips>,
        slots: &Slots<'_>,
    ) -> Result<(), CudaError> {
        let (beside, apart) = beside_or_apart(shared, slots);
        // SAFETY: the caller's promise.
        unsafe {
            shared_gate_up(&self.linear, act, x, weights, apart, slots)?;
            self.project(Projection::GateUp, act, x, weights, beside, slots, 0)
        }
    }

    /// `parts[slot_parts[s]] = down act[s]` for each slot, then `parts[row * stride + stride - 1]` by the shared expert.
    /// `act` as from [`gate_up`](Self::gate_up); `parts: [rows, stride, N]`.
    ///
    /// # Safety
    /// As [`gate_up`](Self::gate_up), which was the last kernel that was queued.
    pub unsafe fn down(
        &self,
        parts: Pointer<bf16>,
        act: Pointer<bf16>,
        weights: &Strips,
        shared: Option<&Strips>,
        slots: &Slots<'_>,
        stride: usize,
    ) -> Result<(), CudaError> {
        let (beside, apart) = beside_or_apart(shared, slots);
        // SAFETY: the caller's promise.
        unsafe {
            self.project(Projection::Down, parts, act, weights, beside, slots, stride)?;
            shared_down(&self.linear, parts, act, weights, apart, slots, stride)
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the kernels")]
    unsafe fn project(
        &self,
        projection: Projection,
        out: Pointer<bf16>,
        x: Pointer<bf16>,
        weights: &Strips,
        beside: Option<&Strips>,
        slots: &Slots<'_>,
        stride: usize,
    ) -> Result<(), CudaError> {
        let of_format = self.formats.get(&weights.format.suffix()).ok_or_else(|| CudaError::Unsupported {
            operation: "experts",
            what: format!("{:?}, which was not loaded", weights.format),
        })?;
        let few = slots.tile_rows == FEW;
        let with = match few {
            true if slots.rows <= FEWEST_ROWS => &of_format.fewest,
            true => &of_format.few,
            false => &of_format.many,
        };
        let with = &with[projection as usize];
        let shared_blocks =
            beside.map_or(0, |shared| shared.rows.div_ceil(SHARED_TILE[0]) * slots.rows.div_ceil(SHARED_TILE[1]));
        let wide = self.hopper && !few;
        let tiled = weights.rows.div_ceil(with.rows) * slots.tiles_max;
        // The wide kernels go through all tiles with as many blocks as there are places.
        let blocks = if wide { tiled.min(self.multiprocessors) } else { tiled + shared_blocks };
        let shape = LaunchShape::new([blocks as u32, 1, 1], with.threads).shared(with.shared_bytes).overlapping();
        let bytes = weights.format.matrix_bytes(weights.rows, weights.cols) as u64;
        let shared_data = beside.map_or(Pointer::null(), |shared| shared.data);
        let numbers = [weights.rows, weights.cols, slots.rows, slots.count(), stride, shared_blocks];
        let numbers = numbers.map(|number| number as i32);
        let (out, x, data, scales) =
            (argument(&out), argument(&x), argument(&weights.data), argument(&weights.global_scales));
        let routes = slots.choices.routes();
        let (bytes, shared_data) = (argument(&bytes), argument(&shared_data));
        let number = |index: usize| argument(&numbers[index]);
        // SAFETY: the parameters of the sources; the kernels wait; the rest is the caller's promise.
        unsafe {
            if !wide {
                let [a, b, c, d] = routes;
                let [n, k, rows, count, stride, blocks] = std::array::from_fn(number);
                with.kernel.launch(
                    shape,
                    &[out, x, data, bytes, scales, shared_data, a, b, c, d, n, k, rows, count, stride, blocks],
                )
            } else {
                let [a, b, c, d] = routes;
                with.kernel.launch(shape, &[out, x, data, bytes, scales, a, b, c, d, number(0), number(1)])
            }
        }
    }
}

/// The shared expert as one more of the experts, or, with many rows, as a product of its own: [`Linear`] has better tiles for
/// it.
fn beside_or_apart<'a>(shared: Option<&'a Strips>, slots: &Slots<'_>) -> (Option<&'a Strips>, Option<&'a Strips>) {
    if slots.tile_rows == FEW { (shared, None) } else { (None, shared) }
}

/// The first product of the shared expert by itself, into the part of `act` behind the slots'.
///
/// # Safety
/// As [`Experts::gate_up`].
pub(super) unsafe fn shared_gate_up(
    linear: &Linear,
    act: Pointer<bf16>,
    x: Pointer<bf16>,
    weights: &Strips,
    shared: Option<&Strips>,
    slots: &Slots<'_>,
) -> Result<(), CudaError> {
    let Some(shared) = shared else { return Ok(()) };
    // SAFETY: the caller's promise.
    unsafe { linear.gate_up(act.add(slots.count() * weights.rows / 2), x, shared, slots.rows) }
}

/// The second product of the shared expert by itself, into each row's last part.
///
/// # Safety
/// As [`Experts::down`].
pub(super) unsafe fn shared_down(
    linear: &Linear,
    parts: Pointer<bf16>,
    act: Pointer<bf16>,
    weights: &Strips,
    shared: Option<&Strips>,
    slots: &Slots<'_>,
    stride: usize,
) -> Result<(), CudaError> {
    let Some(shared) = shared else { return Ok(()) };
    let n = weights.rows;
    // SAFETY: the caller's promise.
    unsafe {
        let act = act.add(slots.count() * weights.cols);
        linear.bf16_apart(parts.add((stride - 1) * n), act, shared, slots.rows, stride * n)
    }
}
