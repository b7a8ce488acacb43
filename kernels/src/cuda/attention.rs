//! From a token's embedding to its attention over the pages of its sequence. `cu/rope`, `cu/attention`.

use half::bf16;
use minnow_common::BLOCK;

use super::device::{CudaError, Device, Kernel, LaunchShape, Pointer, argument};
use crate::ops::Heads;

/// The only width of a head, and of the rotated part of it, that the kernels are made for.
const DIM: usize = 128;
const ROTARY_DIM: usize = 64;
/// Chunks of keys that are folded, at most: as in the source.
const CHUNKS_MAX: usize = 32;
/// Rows of a block of threads, as in the source.
const ATTEND_ROWS: usize = 128;
const PARTIAL_ROWS: usize = 64;
/// `attend_one`: blocks of a cluster, rows of its query heads, threads, shared memory.
const ONE_CLUSTER: usize = 8;
const ONE_ROWS: usize = 64;
const ONE_THREADS: u32 = 256;
const ONE_SHARED_BYTES: u32 = 217 * 1024 + 16;

/// `tiles` tiles of 128 keys and of 128 values each, and `rows` queries.
const fn shared_bytes(tiles: usize, rows: usize) -> u32 {
    ((2 * 128 * tiles + rows) * DIM * size_of::<bf16>()) as u32
}

const AHEAD_SHARED_BYTES: u32 = shared_bytes(2, ATTEND_ROWS);
/// Two tiles, and eight barriers.
const WIDE_SHARED_BYTES: u32 = AHEAD_SHARED_BYTES + 64;
const ATTEND_SHARED_BYTES: u32 = shared_bytes(1, ATTEND_ROWS);
const PARTIAL_SHARED_BYTES: u32 = shared_bytes(1, PARTIAL_ROWS);

/// The kernels of this family.
#[derive(Clone, Debug)]
pub struct Attention {
    embed: Kernel,
    norm_and_rope: Kernel,
    attend: Kernel,
    /// Whether that is Hopper's.
    is_wide: bool,
    attend_threads: u32,
    attend_shared_bytes: u32,
    partial: Kernel,
    combine: Kernel,
    /// Everything for a single block; Hopper's.
    one: Option<Kernel>,
    multiprocessors: usize,
}

/// Which pages the blocks of a batch see, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct BlockTables {
    /// `[blocks, 2]`: where the pages of a block's sequence start in `page_tables`, and how many it sees, its own
    /// included, which is the last of them.
    pub blocks: Pointer<u32>,
    /// Numbers of pages.
    pub page_tables: Pointer<u32>,
}

/// Keys and values of one layer in device memory.
#[derive(Clone, Copy, Debug)]
pub struct PagesOfLayer {
    /// The layer's part of page 0: keys `[kv heads, 32, dim]`, then values.
    pub first: Pointer<bf16>,
    /// Elements from one page to the next.
    pub page_stride: u64,
}

/// What turns projections into queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct HeadTransform {
    /// `[dim]`, or null for no norm.
    pub query_norm: Pointer<bf16>,
    /// `[dim]`, or null for no norm.
    pub key_norm: Pointer<bf16>,
    /// Cosine and sine, `[positions, 32, 2]`.
    pub rotations: Pointer<bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

impl Attention {
    /// Loads the kernels.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        let has_room_ahead = device.properties().shared_bytes_max >= AHEAD_SHARED_BYTES;
        let is_wide = device.has_module("attention_wide_sm90a")?;
        let (module, attend, attend_threads, attend_shared_bytes) = match is_wide {
            true => ("attention_wide_sm90a", "attend_wide", 384, WIDE_SHARED_BYTES),
            false if has_room_ahead => ("attention", "attend_ahead", 256, AHEAD_SHARED_BYTES),
            false => ("attention", "attend", 256, ATTEND_SHARED_BYTES),
        };
        let attend = device.kernel(module, attend)?;
        let partial = device.kernel("attention", "partial")?;
        attend.allow_shared(attend_shared_bytes)?;
        partial.allow_shared(PARTIAL_SHARED_BYTES)?;
        let one = match device.has_module("attention_one_sm90a")? {
            true => Some(device.kernel("attention_one_sm90a", "attend_one")?),
            false => None,
        };
        one.iter().try_for_each(|kernel| kernel.allow_shared(ONE_SHARED_BYTES))?;
        Ok(Self {
            one,
            embed: device.kernel("rope", "embed")?,
            norm_and_rope: device.kernel("rope", "norm_and_rope")?,
            attend,
            is_wide,
            attend_threads,
            attend_shared_bytes,
            partial,
            combine: device.kernel("attention", "combine")?,
            multiprocessors: device.properties().multiprocessors as usize,
        })
    }

    /// Whether the kernels can do attention of this shape.
    pub fn check(heads: Heads, rotary_dim: usize) -> Result<(), CudaError> {
        if heads.dim == DIM && rotary_dim == ROTARY_DIM {
            return Ok(());
        }
        let what =
            format!("heads of {} with {rotary_dim} rotated dimensions, only of {DIM} with {ROTARY_DIM}", heads.dim);
        Err(CudaError::Unsupported { operation: "attention", what })
    }

    /// `x[r] = embedding[tokens[r]]`; `x: [rows, dim]`, `tokens: [rows]`, `embedding: [vocab, dim]`.
    ///
    /// # Safety
    /// The pointers are of that many elements, aligned to 16 bytes, `dim` is a multiple of 8, and tokens are below
    /// `vocab`.
    pub unsafe fn embed(
        &self,
        x: Pointer<bf16>,
        tokens: Pointer<u32>,
        embedding: Pointer<bf16>,
        rows: usize,
        dim: usize,
    ) -> Result<(), CudaError> {
        let launch = LaunchShape::new([rows as u32, 1, 1], 256).overlapping();
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.embed.launch(launch, &[argument(&tokens), argument(&embedding), argument(&x), argument(&(dim as i32))])
        }
    }

    /// Normalises and rotates the heads of `qkv: [blocks * 32, (query + 2 kv) * dim]`: queries into
    /// `q: [blocks * 32, query * dim]`, keys and values into the last page of each block.
    ///
    /// # Safety
    /// The pointers are of that many elements; every page that `tables` name exists, and positions are below those of
    /// `transform.rotations`.
    #[expect(clippy::too_many_arguments, reason = "a kernel's inputs and outputs")]
    pub unsafe fn norm_and_rope(
        &self,
        q: Pointer<bf16>,
        pages: PagesOfLayer,
        qkv: Pointer<bf16>,
        transform: &HeadTransform,
        tables: BlockTables,
        blocks: usize,
        heads: Heads,
    ) -> Result<(), CudaError> {
        let groups = (heads.query + 2 * heads.kv).div_ceil(8);
        let launch = LaunchShape::new([(blocks * BLOCK) as u32, groups as u32, 1], 256).overlapping();
        // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
        unsafe {
            self.norm_and_rope.launch(
                launch,
                &[
                    argument(&qkv),
                    argument(&transform.query_norm),
                    argument(&transform.key_norm),
                    argument(&transform.rotations),
                    argument(&tables.blocks),
                    argument(&tables.page_tables),
                    argument(&q),
                    argument(&pages.first),
                    argument(&pages.page_stride),
                    argument(&(heads.query as i32)),
                    argument(&(heads.kv as i32)),
                    argument(&transform.eps),
                ],
            )
        }
    }

    /// Whether [`attend_one`](Self::attend_one) takes batches of so many blocks.
    #[must_use]
    pub fn takes_one(&self, blocks: usize) -> bool {
        blocks == 1 && self.one.is_some()
    }

    /// [`norm_and_rope`](Self::norm_and_rope) and [`attend`](Self::attend) of a single block, with the same bits.
    /// `out: [32, query * dim]`.
    ///
    /// # Safety
    /// As those two. No kernel since the last one that did not overlap writes the pages of earlier blocks.
    ///
    /// # Panics
    /// If [`takes_one`](Self::takes_one) says no.
    pub unsafe fn attend_one(
        &self,
        out: Pointer<bf16>,
        pages: PagesOfLayer,
        qkv: Pointer<bf16>,
        transform: &HeadTransform,
        tables: BlockTables,
        heads: Heads,
    ) -> Result<(), CudaError> {
        let group = heads.query / heads.kv;
        let grid = [ONE_CLUSTER, heads.kv * (group * BLOCK).div_ceil(ONE_ROWS), 1].map(|count| count as u32);
        let launch = LaunchShape::new(grid, ONE_THREADS).shared(ONE_SHARED_BYTES).overlapping();
        let kernel = self.one.as_ref().expect("a GPU that takes one block by itself");
        // SAFETY: the parameters of the source; the kernel waits before it reads or writes what kernels in front of it
        // write or read; the rest is the caller's promise.
        unsafe {
            kernel.launch(
                launch,
                &[
                    argument(&qkv),
                    argument(&transform.query_norm),
                    argument(&transform.key_norm),
                    argument(&transform.rotations),
                    argument(&pages.first),
                    argument(&tables.blocks),
                    argument(&tables.page_tables),
                    argument(&out),
                    argument(&pages.page_stride),
                    argument(&(heads.kv as i32)),
                    argument(&(group as i32)),
                    argument(&transform.eps),
                ],
            )
        }
    }

    /// Floats of scratch that [`attend`](Self::attend) needs for batches of up to `blocks`: `(sums, weights)`.
    #[must_use]
    pub fn scratch_len(&self, blocks: usize, heads: Heads) -> (usize, usize) {
        let split = blocks.min(self.split_blocks_max(heads));
        let rows = split * CHUNKS_MAX * heads.query * BLOCK;
        (rows * DIM, rows * 2)
    }

    /// Batches of up to this many blocks are spread over the GPU chunk by chunk; larger ones fill it as they are. The
    /// result is the same bits.
    fn split_blocks_max(&self, heads: Heads) -> usize {
        let threads_of_block = heads.kv * (heads.query / heads.kv * BLOCK).div_ceil(ATTEND_ROWS);
        // Hopper's kernel for larger ones is some three times as fast as the split one.
        let filled = if self.is_wide { self.multiprocessors / 4 } else { self.multiprocessors / 2 };
        filled / threads_of_block
    }

    /// `out = softmax(q . k / sqrt(dim)) v` over the pages each block sees. `q`, `out`: `[blocks * 32, query * dim]`.
    ///
    /// # Safety
    /// The pointers are of that many elements, `scratch` as [`scratch_len`](Self::scratch_len) says for at least that
    /// many blocks; every page that `tables` name exists.
    #[expect(clippy::too_many_arguments, reason = "a kernel's inputs and outputs")]
    pub unsafe fn attend(
        &self,
        out: Pointer<bf16>,
        q: Pointer<bf16>,
        pages: PagesOfLayer,
        tables: BlockTables,
        (sums, weights): (Pointer<f32>, Pointer<f32>),
        blocks: usize,
        heads: Heads,
    ) -> Result<(), CudaError> {
        let group = heads.query / heads.kv;
        let (kv, group_argument, query) = (heads.kv as i32, group as i32, heads.query as i32);
        let inputs = [argument(&q), argument(&pages.first), argument(&tables.blocks), argument(&tables.page_tables)];
        let sizes = [argument(&pages.page_stride), argument(&kv), argument(&group_argument)];
        if blocks > self.split_blocks_max(heads) {
            let grid = [heads.kv, (group * BLOCK).div_ceil(ATTEND_ROWS), blocks].map(|count| count as u32);
            let launch = LaunchShape::new(grid, self.attend_threads).shared(self.attend_shared_bytes).overlapping();
            let arguments = [&inputs[..], &[argument(&out)], &sizes].concat();
            // SAFETY: the parameters of the source; the kernel waits; the rest is the caller's promise.
            return unsafe { self.attend.launch(launch, &arguments) };
        }
        let parts = (group * BLOCK).div_ceil(PARTIAL_ROWS);
        let launch = LaunchShape::new([CHUNKS_MAX, heads.kv * parts, blocks].map(|count| count as u32), 128);
        let arguments = [&inputs[..], &[argument(&sums), argument(&weights)], &sizes].concat();
        // SAFETY: as above.
        unsafe { self.partial.launch(launch.shared(PARTIAL_SHARED_BYTES).overlapping(), &arguments) }?;
        let launch = LaunchShape::new([4, heads.query as u32, blocks as u32], 256).overlapping();
        let arguments =
            [argument(&sums), argument(&weights), argument(&tables.blocks), argument(&out), argument(&query)];
        // SAFETY: as above.
        unsafe { self.combine.launch(launch, &arguments) }
    }
}
