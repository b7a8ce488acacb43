//! What a GPU gives at best, measured: the yardstick of every report. `cu/probe`.

use super::device::{CudaError, Device, LaunchShape, argument};

/// Bytes that are moved at a time: many times the largest cache.
const BYTES_MAX: u64 = 2 << 30;
const THREADS: u32 = 512;
/// Timed runs, of which the median counts.
const RUNS: usize = 9;

/// Bytes of device memory in a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryCeilings {
    /// Read.
    pub read: f64,
    /// Read and written, added up, in a copy.
    pub copy: f64,
}

/// BF16 operations in a second, an addition and a product being two, of `mma.sync` on registers alone. Hopper's `wgmma`
/// reaches about half as much again.
pub fn product_ceiling(device: &Device) -> Result<f64, CudaError> {
    const STEPS: u32 = 20_000;
    /// Warps of a block times products of a step times operations of a product.
    const OF_STEP: f64 = 16.0 * 8.0 * 2.0 * 16.0 * 16.0 * 8.0;
    let multiply = device.kernel("ceilings", "multiply_all")?;
    let (out, start, end) = (device.zeroed::<f32>(1)?, device.event()?, device.event()?);
    let blocks = 2 * device.properties().multiprocessors;
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        start.record()?;
        let shape = LaunchShape::new([blocks, 1, 1], THREADS);
        // SAFETY: the parameters of the source; `out` has one element.
        unsafe { multiply.launch(shape, &[argument(&STEPS), argument(&out.pointer())]) }?;
        end.record()?;
        end.synchronize()?;
        best = best.min(end.seconds_since(&start)?);
    }
    Ok(f64::from(blocks) * f64::from(STEPS) * OF_STEP / best)
}

/// Measures on memory that is free now.
pub fn memory_ceilings(device: &Device) -> Result<MemoryCeilings, CudaError> {
    let bytes = BYTES_MAX.min(device.free_bytes()? / 4) / 4096 * 4096;
    let (from, to) = (device.zeroed::<[u32; 4]>(bytes as usize / 16)?, device.zeroed::<[u32; 4]>(bytes as usize / 16)?);
    let (read, copy) = (device.kernel("ceilings", "read_all")?, device.kernel("ceilings", "copy_all")?);
    let shape = LaunchShape::new([4 * device.properties().multiprocessors, 1, 1], THREADS);
    let (len, start, end) = (from.len() as u64, device.event()?, device.event()?);
    let median = |kernel: &super::Kernel| -> Result<f64, CudaError> {
        let mut seconds = Vec::with_capacity(RUNS);
        for _ in 0..=RUNS {
            start.record()?;
            // SAFETY: the parameters of the source; both buffers have `len` elements, and `to` is written by nobody else.
            unsafe { kernel.launch(shape, &[argument(&from.pointer()), argument(&len), argument(&to.pointer())]) }?;
            end.record()?;
            end.synchronize()?;
            seconds.push(end.seconds_since(&start)?);
        }
        // The first run is a warm-up.
        seconds.remove(0);
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[RUNS / 2])
    };
    Ok(MemoryCeilings { read: bytes as f64 / median(&read)?, copy: 2.0 * bytes as f64 / median(&copy)? })
}
