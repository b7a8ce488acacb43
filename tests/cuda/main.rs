//! The CUDA kernels and backend on a GPU; where there is none, each test says that it was skipped. `emulation` needs none.

mod emulation;
mod fused;
mod kernels;
mod matrices;
mod model;

use minnow_kernels::cuda::{Device, device_count};

/// The first GPU; `None`, said aloud, if there is none.
fn device() -> Option<Device> {
    match device_count() {
        Ok(_) => Some(Device::open(0).expect("a GPU that opens")),
        Err(cause) => {
            eprintln!("skipped: no CUDA device: {cause}");
            None
        }
    }
}
