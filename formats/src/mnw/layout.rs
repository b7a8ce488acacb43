//! Where a writer puts each region: sections 1 and 2 of `docs/format-mnw.md`, and nothing else.

use minnow_common::{FileOffset, TensorSpec};

use super::header::ALIGNMENT;

/// The canonical offsets of a list of tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// One for each tensor, in the order given.
    pub places: Vec<Place>,
    /// Start of the manifest, which is also the end of the payload.
    pub manifest_offset: FileOffset,
}

/// Where one tensor's regions start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The data region.
    pub data: FileOffset,
    /// The scales region of a quantized tensor.
    pub scales: Option<FileOffset>,
}

impl Layout {
    /// Lays out `specs`, which come in bytewise order of their names. `None` if the file would pass 2^64 bytes.
    pub fn of<'a>(specs: impl IntoIterator<Item = &'a TensorSpec>) -> Option<Self> {
        let mut next = FileOffset(ALIGNMENT);
        let mut place = |bytes: u64| {
            let start = next;
            next = start.checked_add(bytes)?.checked_align_up(ALIGNMENT)?;
            Some(start)
        };
        let mut places = Vec::new();
        for spec in specs {
            let data = place(spec.data_bytes())?;
            let scales = if spec.encoding().is_quantized() { Some(place(spec.scales_bytes())?) } else { None };
            places.push(Place { data, scales });
        }
        Some(Self { places, manifest_offset: next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minnow_common::{Encoding, FloatType, Shape};

    #[test]
    fn regions_follow_each_other_on_page_boundaries() {
        let float = |len| TensorSpec::new(Shape::vector(len), Encoding::Float(FloatType::F32), 0, None).unwrap();
        let quantized = TensorSpec::new(Shape::matrix(64, 64), Encoding::I4Mma, 32, None).unwrap();
        let layout = Layout::of([&float(1), &quantized, &float(1024), &float(1025)]).unwrap();
        let data: Vec<u64> = layout.places.iter().map(|place| place.data.0).collect();
        assert_eq!(data, [4096, 8192, 16384, 20480]);
        assert_eq!(layout.places[1].scales, Some(FileOffset(12288)));
        assert_eq!(layout.manifest_offset, FileOffset(28672));

        let huge = TensorSpec::new(Shape::new(vec![u64::MAX / 4]).unwrap(), Encoding::Float(FloatType::F32), 0, None);
        assert_eq!(Layout::of([&huge.unwrap()]), None);
    }
}
