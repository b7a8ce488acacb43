//! The header of one safetensors file: a length, and JSON of that length naming every tensor.
//!
//! Bytes in, values out. After [`parse_header`] every tensor has a shape, a floating type and a range of the file that
//! agree with each other, and the ranges tile the file from the header to its end: no gap, no overlap.

use std::fmt;

use minnow_common::{Encoding, FileOffset, FloatType, Shape, ShapeError, TensorSpec, TensorSpecError};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, de};
use thiserror::Error;

use crate::io::ReadAt;
use crate::names;

/// The longest header. One names about a hundred thousand tensors in 16 MiB.
pub const HEADER_BYTES_MAX: u64 = 16 << 20;
/// Bytes of the length before the header.
const LENGTH_BYTES: u64 = 8;

/// A tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredFloat {
    /// Its name.
    pub name: String,
    /// Shape and type; always floating.
    pub spec: TensorSpec,
    /// Start of its [`TensorSpec::data_bytes`] bytes, from the start of the file.
    pub offset: FileOffset,
}

/// Why a file's header is refused.
#[derive(Debug, Error)]
#[expect(missing_docs, reason = "the messages say what each field is")]
pub enum HeaderError {
    /// Too short for the length.
    #[error("the file has {file_bytes} bytes, expected at least the {LENGTH_BYTES} bytes of a header length")]
    Short { file_bytes: u64 },
    /// A length beyond the limit.
    #[error("the header length is {header_bytes} bytes, more than {HEADER_BYTES_MAX}")]
    HeaderTooLong { header_bytes: u64 },
    /// The header passes the end of the file.
    #[error("the file has {found} bytes, expected at least {expected} for its header alone")]
    HeaderCut { expected: u64, found: u64 },
    /// Not the JSON of a header.
    #[error("the header is not valid: {0}")]
    Json(String),
    /// A tensor's name is unusable.
    #[error("tensor name {0:?} is not 1 to 512 bytes of printable text")]
    Name(String),
    /// A type other than the three floating ones.
    #[error("tensor {tensor} has type {dtype:?}, expected BF16, F16 or F32")]
    Type { tensor: String, dtype: String },
    /// An impossible shape; rank 0 and empty tensors included.
    #[error("tensor {tensor}: {error}")]
    Shape { tensor: String, error: ShapeError },
    /// A shape whose byte count does not fit 64 bits.
    #[error("tensor {tensor}: {error}")]
    Spec { tensor: String, error: TensorSpecError },
    /// The range has another length than shape and type need.
    #[error("tensor {tensor} has bytes {start}..{end}, expected {expected} bytes for its shape and type")]
    Length { tensor: String, start: u64, end: u64, expected: u64 },
    /// Bytes that belong to no tensor, or to two.
    #[error("tensor {tensor} starts at byte {found} of the data, expected {expected} right after the one before")]
    Tiling { tensor: String, found: u64, expected: u64 },
    /// Nothing inside.
    #[error("the file has no tensors")]
    Empty,
    /// The file is shorter or longer than its header says.
    #[error("the file has {found} bytes, expected {expected} as its header declares")]
    FileLength { expected: u64, found: u64 },
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] crate::io::IoError),
}

/// Reads and checks the header of `file`. The tensors come in the order of their bytes.
pub fn parse_header(file: &dyn ReadAt) -> Result<Vec<StoredFloat>, HeaderError> {
    let file_bytes = file.len();
    if file_bytes < LENGTH_BYTES {
        return Err(HeaderError::Short { file_bytes });
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_exact_at(FileOffset(0), &mut length)?;
    let header_bytes = u64::from_le_bytes(length);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(HeaderError::HeaderTooLong { header_bytes });
    }
    let data_start = LENGTH_BYTES + header_bytes;
    if data_start > file_bytes {
        return Err(HeaderError::HeaderCut { expected: data_start, found: file_bytes });
    }
    let mut json = vec![0; header_bytes as usize];
    file.read_exact_at(FileOffset(LENGTH_BYTES), &mut json)?;
    let RawHeader(raw) = serde_json::from_slice(&json).map_err(|error| HeaderError::Json(error.to_string()))?;

    let mut tensors = raw
        .into_iter()
        .map(|(name, tensor)| tensor.check(name, data_start))
        .collect::<Result<Vec<StoredFloat>, HeaderError>>()?;
    tensors.sort_by_key(|tensor| tensor.offset);
    let mut end = data_start;
    for tensor in &tensors {
        if tensor.offset.0 != end {
            let (found, expected) = (tensor.offset.0 - data_start, end - data_start);
            return Err(HeaderError::Tiling { tensor: tensor.name.clone(), found, expected });
        }
        end = tensor.end();
    }
    match () {
        () if tensors.is_empty() => Err(HeaderError::Empty),
        () if end != file_bytes => Err(HeaderError::FileLength { expected: end, found: file_bytes }),
        () => Ok(tensors),
    }
}

impl StoredFloat {
    /// One past the last byte. Does not overflow: checked when the header was read.
    fn end(&self) -> u64 {
        self.offset.0 + self.spec.data_bytes()
    }
}

/// One entry of the JSON.
#[derive(Deserialize)]
struct RawTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl RawTensor {
    fn check(self, name: String, data_start: u64) -> Result<StoredFloat, HeaderError> {
        if !names::is_tensor_name(&name) {
            return Err(HeaderError::Name(name));
        }
        let floats = [FloatType::Bf16, FloatType::F16, FloatType::F32];
        let Some(float) = floats.into_iter().find(|float| float.safetensors_name() == self.dtype) else {
            return Err(HeaderError::Type { tensor: name, dtype: self.dtype });
        };
        let shape = match Shape::new(self.shape) {
            Ok(shape) => shape,
            Err(error) => return Err(HeaderError::Shape { tensor: name, error }),
        };
        let spec = match TensorSpec::new(shape, Encoding::Float(float), 0, None) {
            Ok(spec) => spec,
            Err(error) => return Err(HeaderError::Spec { tensor: name, error }),
        };
        let [start, end] = self.data_offsets;
        let expected = spec.data_bytes();
        let offset = data_start.checked_add(start);
        match offset {
            Some(offset) if end.checked_sub(start) == Some(expected) && offset.checked_add(expected).is_some() => {
                Ok(StoredFloat { name, spec, offset: FileOffset(offset) })
            }
            _ => Err(HeaderError::Length { tensor: name, start, end, expected }),
        }
    }
}

/// The JSON object: every entry but `__metadata__`, in the order written, no name twice.
struct RawHeader(Vec<(String, RawTensor)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps names to tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut seen = std::collections::HashSet::new();
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if !seen.insert(name.clone()) {
                        return Err(de::Error::custom(format!("the name {name:?} occurs twice")));
                    }
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(RawHeader(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::from_static;

    fn parse(json: &str, data_bytes: usize) -> Result<Vec<StoredFloat>, HeaderError> {
        let mut file = (json.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(json.as_bytes());
        file.resize(file.len() + data_bytes, 0);
        parse_header(&*from_static("x.safetensors", file.leak()))
    }

    #[test]
    fn tensors_come_in_the_order_of_their_bytes() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]},
            "a":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}   "#;
        let tensors = parse(json, 12).unwrap();
        let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(tensors[1].offset.0, 8 + json.len() as u64 + 4);
        assert_eq!(tensors[0].spec.encoding(), Encoding::Float(FloatType::Bf16));
    }

    #[test]
    fn files_of_the_reference_library_read_the_same() {
        use ::safetensors::tensor::{Dtype, SafeTensors, TensorView};
        let bytes: Vec<u8> = (0..40).collect();
        let view = |dtype, shape: &[usize], range: std::ops::Range<usize>| {
            TensorView::new(dtype, shape.to_vec(), &bytes[range]).unwrap()
        };
        let views = [
            ("c", view(Dtype::BF16, &[2, 3], 0..12)),
            ("a", view(Dtype::F32, &[5], 12..32)),
            ("b", view(Dtype::F16, &[1, 2, 2], 32..40)),
        ];
        let file: &'static [u8] = ::safetensors::serialize(views, None).unwrap().leak();
        let theirs = SafeTensors::deserialize(file).unwrap();
        let ours = parse_header(&*from_static("x", file)).unwrap();
        assert_eq!(ours.len(), 3);
        for StoredFloat { name, spec, offset } in ours {
            let view = theirs.tensor(&name).unwrap();
            let range = offset.0 as usize..(offset.0 + spec.data_bytes()) as usize;
            assert_eq!(&file[range], view.data());
            assert!(spec.shape().dims().iter().zip(view.shape()).all(|(&ours, &theirs)| ours == theirs as u64));
        }
    }

    #[test]
    fn every_fault_is_named() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let cases: &[(String, usize, &str)] = &[
            ("[]".to_owned(), 0, "expected an object"),
            ("{".to_owned(), 0, "not valid"),
            ("{}".to_owned(), 0, "no tensors"),
            (one("I64", "[1]", "[0,8]"), 8, "tensor t has type \"I64\""),
            (one("bf16", "[1]", "[0,2]"), 2, "tensor t has type"),
            (one("F32", "[]", "[0,4]"), 4, "tensor t: a tensor has 1 to 8 dimensions"),
            (one("F32", "[0]", "[0,0]"), 0, "tensor t: dimension 0 is zero"),
            (one("F32", "[-1]", "[0,4]"), 4, "not valid"),
            (one("F32", "[4294967296,4294967296]", "[0,4]"), 4, "tensor t: the element count overflows"),
            (one("F32", "[9223372036854775808]", "[0,4]"), 4, "tensor t: the byte count overflows"),
            (one("F32", "[2]", "[0,4]"), 4, "expected 8 bytes"),
            (one("F32", "[1]", "[4,0]"), 4, "expected 4 bytes"),
            (one("F32", "[1]", "[18446744073709551612,0]"), 4, "expected 4 bytes"),
            (one("F32", "[1]", "[18446744073709551600,18446744073709551604]"), 4, "expected 4 bytes"),
            (one("F32", "[1]", "[4,8]"), 8, "starts at byte 4 of the data, expected 0"),
            (one("F32", "[1]", "[0,4]"), 3, "has 65 bytes, expected 66"),
            (one("F32", "[1]", "[0,4]"), 5, "has 67 bytes, expected 66"),
            (r#"{"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"a":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#.to_owned(), 4, "\"a\" occurs twice"),
            (r#"{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}"#.to_owned(), 4, "tensor b starts at byte 2"),
            (r#"{"a\u001b[31m":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}"#.to_owned(), 2, "printable"),
        ];
        for (json, data_bytes, expected) in cases {
            let error = parse(json, *data_bytes).expect_err(json).to_string();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }

    #[test]
    fn hostile_lengths_are_refused_before_anything_is_allocated() {
        for (bytes, expected) in [
            (&b""[..], "has 0 bytes"),
            (&b"\x02\0\0\0\0\0\0"[..], "has 7 bytes"),
            (&b"\x02\0\0\0\0\0\0\0{"[..], "has 9 bytes, expected at least 10"),
            (&b"\xff\xff\xff\xff\xff\xff\xff\xff{}"[..], "18446744073709551615 bytes, more than"),
            (&b"\x01\0\0\x01\0\0\0\0{}"[..], "16777217 bytes, more than"),
        ] {
            let error = parse_header(&*from_static("x", bytes)).expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
