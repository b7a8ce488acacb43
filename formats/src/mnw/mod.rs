//! The `.mnw` v1 container: header, payload regions, and a MessagePack manifest. `docs/format-mnw.md` has the bytes;
//! the modules below have the constants, under the same names.
//!
//! Reading: [`open`] meets every structural check and gives a [`Container`]; [`validate`] adds digests, scale values
//! and, at [`Level::Strict`], the canonical form. Writing: [`Writer`] makes only what passes `strict`.

mod error;
mod header;
mod layout;
mod manifest;
pub mod msgpack;
mod scales;
mod validate;
mod write;

pub use error::{MnwError, RegionPart};
pub use header::{ALIGNMENT, HEADER_BYTES, Header, MAGIC, MANIFEST_BYTES_MAX};
pub use layout::Layout;
pub use manifest::{Manifest, Region, Tensor};
pub use msgpack::MsgpackError;
pub use scales::{BadScale, check_scales};
pub use validate::{Container, Level, Report, UnknownLevel, open, validate};
pub use write::{Plan, WriteError, Writer, Written};
