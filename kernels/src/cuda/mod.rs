//! CUDA kernels, under feature `cuda`: one file an operation family, mirroring the folders of `kernels/cu`.
//!
//! [`Device`] is a GPU with a stream; everything runs in order on that stream and is asynchronous until
//! [`Device::synchronize`]. NVIDIA's driver library is loaded at run time: a program with this feature starts on any
//! machine, and [`device_count`] says why there is nothing to run on. No other NVIDIA library is used.
//!
//! Activations are BF16 with FP32 sums; rounding points are those of the model description, section 4, as each kernel's
//! header says. Every kernel keeps the promise of [`crate::ops`], "Batch invariance".

mod attention;
mod ceilings;
mod device;
mod experts;
mod experts_fp4;
mod experts_int8;
mod linear;
mod norm;
mod route;
mod sample;
mod strips;

pub use attention::{Attention, BlockTables, HeadTransform, PagesOfLayer};
pub use ceilings::{MemoryCeilings, memory_ceilings, product_ceiling};
pub use device::{
    Argument, Buffer, CudaError, Device, Event, Graph, Kernel, KernelArgument, KernelTime, LaunchShape, Pinned, Plain,
    Pointer, Properties, Unavailable, argument, device_count,
};
pub use experts::{Experts, Slots};
pub use experts_fp4::Fp4Experts;
pub use experts_int8::{Int8Experts, QuantizedRows};
pub use linear::{Linear, VOCABULARY_TILE};
pub use norm::{Norm, NormShape, Parts};
pub use route::{Choices, Router, tiles_max};
pub use sample::{RowBest, Sampler, TileBest};
pub use strips::{Format, Relayout, Stored, Strips};
