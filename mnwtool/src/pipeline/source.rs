//! Where tensors come from, and how they are cut into units of work.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use minnow_common::{FileOffset, Shape, TensorSpec, TensorSpecError};
use minnow_formats::checkpoint::{Checkpoint, Digests, Span};
use minnow_formats::io::{IoError, ReadAt};
use minnow_kernels::codec;

use super::budget::{DECODED_ELEMENTS, SLICE_BYTES};
use crate::plan::{Planned, Work};

/// The two regions of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Elements or codes.
    Data,
    /// Scales of a quantized tensor.
    Scales,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "its data",
            Self::Scales => "its scales",
        })
    }
}

impl Part {
    /// Both, in the order in which they are stored.
    pub(crate) const BOTH: [Self; 2] = [Self::Data, Self::Scales];
}

/// Random access to the bytes of tensors, from several threads at once.
pub(crate) trait Source: Sync {
    /// Fills `out` with the bytes of one region of tensor `name` from byte `start` on.
    fn read_part(&self, name: &str, part: Part, start: u64, out: &mut [u8]) -> Result<(), IoError>;

    /// The file that a region lies in, and where: then the pipeline reads it, several units at a time. `None` if the
    /// worker that needs the bytes had better ask [`Source::read_part`] for them, as they are in memory or are made up.
    fn place(&self, name: &str, part: Part) -> Option<(&Arc<dyn ReadAt>, FileOffset)>;

    /// What the regions of `name` should hash to, if the source knows.
    fn digests(&self, name: &str) -> Option<Digests>;

    /// Checks that no file of the source was written to since it was opened.
    fn check_unchanged(&self) -> Result<(), IoError>;
}

impl Source for Checkpoint {
    fn read_part(&self, name: &str, part: Part, start: u64, out: &mut [u8]) -> Result<(), IoError> {
        let span = span(self, name, part);
        debug_assert!(start + out.len() as u64 <= span.bytes, "{name}: outside its region");
        self.files()[self.tensors()[name].file].read_exact_at(FileOffset(span.offset.0 + start), out)
    }

    fn place(&self, name: &str, part: Part) -> Option<(&Arc<dyn ReadAt>, FileOffset)> {
        let file = &self.files()[self.tensors()[name].file];
        file.as_slice().is_none().then(|| (file, span(self, name, part).offset))
    }

    fn digests(&self, name: &str) -> Option<Digests> {
        self.tensors()[name].digests
    }

    fn check_unchanged(&self) -> Result<(), IoError> {
        self.files().iter().try_for_each(|file| file.check_unchanged())
    }
}

fn span(checkpoint: &Checkpoint, name: &str, part: Part) -> Span {
    let tensor = &checkpoint.tensors()[name];
    match part {
        Part::Data => tensor.data,
        Part::Scales => tensor.scales.expect("only quantized tensors are asked for scales, and all have them"),
    }
}

/// A piece of work that fits in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unit {
    /// Position in the plan.
    pub(crate) tensor: usize,
    /// Which piece.
    pub(crate) piece: Piece,
    /// Whether it is the tensor's last.
    pub(crate) is_last: bool,
}

/// Part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Bytes of one region, to be copied.
    Bytes {
        /// Which region.
        part: Part,
        /// Where in it.
        range: Range<u64>,
    },
    /// All of it, to be transformed.
    Tensor,
    /// Rows (the product of all dimensions but the last counts) to be decoded; starts at a multiple of eight.
    Rows(Range<u64>),
}

impl Unit {
    /// Bytes of the source that this unit of `tensor` is made from.
    pub(crate) fn source_bytes(&self, tensor: &Planned) -> u64 {
        Part::BOTH.into_iter().map(|part| self.piece.bytes_of(tensor, part)).sum()
    }
}

impl Piece {
    /// What is to be read of a region of `tensor`; empty if nothing is.
    pub(crate) fn range_of(&self, tensor: &Planned, part: Part) -> Range<u64> {
        let spec = &tensor.source;
        match (self, part) {
            (Self::Bytes { part: wanted, range }, part) if *wanted == part => range.clone(),
            (Self::Bytes { .. }, _) => 0..0,
            (Self::Tensor, Part::Data) => 0..spec.data_bytes(),
            (Self::Tensor, Part::Scales) => 0..spec.scales_bytes(),
            (Self::Rows(rows), Part::Data) => Strips::of(spec).data(rows),
            (Self::Rows(rows), Part::Scales) => Strips::of(spec).scales(rows),
        }
    }

    /// The length of that.
    pub(crate) fn bytes_of(&self, tensor: &Planned, part: Part) -> u64 {
        let range = self.range_of(tensor, part);
        range.end - range.start
    }
}

/// A tensor seen as a matrix that can be cut into runs of rows: in every encoding, rows that start at a multiple of eight
/// are contiguous, codes and scales alike.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strips<'a> {
    whole: &'a TensorSpec,
    /// The product of all dimensions but the last.
    pub(crate) rows: u64,
}

impl<'a> Strips<'a> {
    /// The strips of a tensor.
    pub(crate) fn of(whole: &'a TensorSpec) -> Self {
        Self { whole, rows: whole.shape().elements() / whole.shape().last() }
    }

    /// Row ranges of about `elements` elements each, at least eight rows.
    pub(crate) fn cuts(self, elements: u64) -> impl Iterator<Item = Range<u64>> {
        let step = (elements / self.whole.shape().last()).max(1).next_multiple_of(codec::STRIP as u64);
        cuts(self.rows, step)
    }

    /// Where the data of some rows lies in the data region.
    pub(crate) fn data(self, rows: &Range<u64>) -> Range<u64> {
        let row_bytes = self.whole.data_bytes() / self.rows;
        rows.start * row_bytes..rows.end * row_bytes
    }

    /// Where their scales lie in the scales region.
    pub(crate) fn scales(self, rows: &Range<u64>) -> Range<u64> {
        let row_bytes = self.whole.scales_bytes() / self.rows;
        rows.start * row_bytes..rows.end * row_bytes
    }

    /// The spec of some rows as a tensor of their own.
    pub(crate) fn spec(self, rows: &Range<u64>) -> Result<TensorSpec, TensorSpecError> {
        let shape = Shape::matrix((rows.end - rows.start) as usize, self.whole.shape().last() as usize);
        let group = self.whole.group().map_or(0, |group| group.get() as u64);
        TensorSpec::new(shape, self.whole.encoding(), group, self.whole.global_scale())
    }
}

/// The units of a plan from tensor `first` on, in the order in which results are written.
pub(crate) fn units(plan: &[Planned], first: usize) -> impl Iterator<Item = Unit> {
    plan.iter().enumerate().skip(first).flat_map(|(tensor, planned)| {
        let mut pieces = pieces(planned).peekable();
        std::iter::from_fn(move || {
            let piece = pieces.next()?;
            Some(Unit { tensor, piece, is_last: pieces.peek().is_none() })
        })
    })
}

/// How a tensor is cut, in order.
pub(super) fn pieces(tensor: &Planned) -> Box<dyn Iterator<Item = Piece> + '_> {
    match tensor.work {
        Work::Encode | Work::Repack => Box::new(std::iter::once(Piece::Tensor)),
        Work::Decode => Box::new(Strips::of(&tensor.source).cuts(DECODED_ELEMENTS).map(Piece::Rows)),
        Work::Copy => {
            let regions = [(Part::Data, tensor.source.data_bytes()), (Part::Scales, tensor.source.scales_bytes())];
            let slices = |(part, bytes)| cuts(bytes, SLICE_BYTES).map(move |range| Piece::Bytes { part, range });
            Box::new(regions.into_iter().flat_map(slices))
        }
    }
}

/// `0..total` in ranges of `step`, the last one shorter; none if `total` is 0.
pub(crate) fn cuts(total: u64, step: u64) -> impl Iterator<Item = Range<u64>> {
    (0..total.div_ceil(step)).map(move |index| index * step..total.min((index + 1) * step))
}

#[cfg(test)]
mod tests {
    use minnow_common::{Encoding, FloatType};

    use super::*;

    fn planned(spec: TensorSpec, work: Work) -> Planned {
        Planned { name: "x".to_owned(), target: spec.clone(), source: spec, work }
    }

    #[test]
    fn slices_cover_each_region_once_and_in_order() {
        let float = TensorSpec::new(Shape::matrix(3, 1 << 20), Encoding::Float(FloatType::F32), 0, None).unwrap();
        let int8 = TensorSpec::new(Shape::matrix(8, 1 << 20), Encoding::I8Mma, 16, None).unwrap();
        let plan = [planned(float, Work::Copy), planned(int8.clone(), Work::Copy), planned(int8, Work::Encode)];
        let units: Vec<Unit> = units(&plan, 0).collect();
        assert_eq!(units.iter().filter(|unit| unit.is_last).count(), plan.len());
        for (index, tensor) in plan.iter().enumerate() {
            let mine = units.iter().filter(|unit| unit.tensor == index);
            assert_eq!(mine.map(|unit| unit.source_bytes(tensor)).sum::<u64>(), tensor.source_bytes());
        }
        assert!(units.iter().all(|unit| unit.source_bytes(&plan[unit.tensor]) <= SLICE_BYTES || unit.tensor == 2));
        assert_eq!(units.len(), 3 + 2 + 1 + 1);
        assert_eq!(super::units(&plan, 1).collect::<Vec<_>>(), units[3..]);
    }

    #[test]
    fn large_tensors_are_decoded_in_strips_of_whole_tiles() {
        let spec = TensorSpec::new(Shape::new(vec![3, 1000, 16384]).unwrap(), Encoding::I4Sym, 128, None).unwrap();
        let plan = [planned(spec, Work::Decode)];
        let units: Vec<Unit> = units(&plan, 0).collect();
        assert_eq!(units.len(), 24);
        assert!(matches!(&units[1].piece, Piece::Rows(rows) if rows.start == 128 && rows.end == 256));
        assert!(matches!(&units[23].piece, Piece::Rows(rows) if rows.end == 3000) && units[23].is_last);
        assert_eq!(units.iter().map(|unit| unit.source_bytes(&plan[0])).sum::<u64>(), plan[0].source_bytes());
    }
}
