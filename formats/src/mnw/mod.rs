//! The `.mnw` v1 container: header, payload regions, and a MessagePack manifest. `docs/format-mnw.md` has the bytes;
//! the modules below have the constants, under the same names.
//!
//! Reading: [`open`] meets every structural check and gives a [`Container`]; [`validate`] adds digests, scale values
//! and, at [`Level::Strict`], the canonical form; [`validate_all`] lists everything that is wrong. Writing: [`Writer`] makes only what passes `strict`.

mod error;
mod faults;
mod header;
mod journal;
mod layout;
mod manifest;
pub mod msgpack;
mod publish;
mod readback;
mod scales;
mod validate;
mod write;

pub use error::{MnwError, RegionPart};
pub use faults::{PROBLEMS_MAX, Problem};
pub use header::{ALIGNMENT, HEADER_BYTES, Header, MAGIC, MANIFEST_BYTES_MAX};
pub use layout::Layout;
pub use manifest::{Manifest, Region, Tensor};
pub use msgpack::MsgpackError;
pub use publish::leftovers;
pub use scales::{BadScale, check_scales};
pub use validate::{
    Container, Damage, Findings, Level, Report, UnknownLevel, damage, open, open_verified, validate, validate_all,
};
pub use write::{Plan, WriteError, WriteOptions, Writer, Written};
