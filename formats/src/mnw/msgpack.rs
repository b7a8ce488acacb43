//! The part of MessagePack that a manifest may use, read strictly and written canonically (`docs/format-mnw.md`
//! section 3).
//!
//! [`parse`] walks the whole document once, without recursion, and refuses whatever is malformed anywhere in it,
//! also in fields that nobody will look at. What remains is a [`Value`]: a place in bytes known to be well-formed,
//! which is read without building a tree. So memory is bounded by the keys of the maps that are open at one time, and
//! never by a declared count.

use std::collections::HashSet;

use thiserror::Error;

/// Maps and arrays inside each other; a manifest has four levels.
pub const DEPTH_MAX: usize = 8;
/// Pairs of one map; the largest released model has about 25,000 tensors.
pub const PAIRS_MAX: u32 = 1 << 20;

/// Why bytes are not a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[expect(missing_docs, reason = "`at` is where the value starts, in bytes from the start of the manifest")]
pub enum MsgpackError {
    /// The bytes end inside a value.
    #[error("the value at byte {at} is cut off")]
    Truncated { at: usize },
    /// A type byte that is reserved, or an extension type.
    #[error("the type byte {byte:#04x} at byte {at} is not allowed")]
    Type { at: usize, byte: u8 },
    /// A string is not UTF-8.
    #[error("the string at byte {at} is not UTF-8")]
    Utf8 { at: usize },
    /// More elements are declared than bytes remain.
    #[error("{count} elements are declared at byte {at}, more than the bytes that remain")]
    Count { at: usize, count: u32 },
    /// A map has too many pairs.
    #[error("the map at byte {at} has {count} pairs, more than {PAIRS_MAX}")]
    Pairs { at: usize, count: u32 },
    /// Too many levels.
    #[error("more than {DEPTH_MAX} levels are nested at byte {at}")]
    Depth { at: usize },
    /// A map key is not a string.
    #[error("the map key at byte {at} is not a string")]
    Key { at: usize },
    /// A map has a key twice.
    #[error("the map key at byte {at} occurs twice")]
    Duplicate { at: usize },
    /// Bytes follow the document.
    #[error("bytes follow the end of the map at byte {at}")]
    Trailing { at: usize },
}

/// Checks a whole document and returns its outermost value.
pub fn parse(bytes: &[u8]) -> Result<Value<'_>, MsgpackError> {
    let mut cursor = Cursor { bytes, at: 0 };
    let mut open: Vec<Open<'_>> = Vec::with_capacity(DEPTH_MAX);
    loop {
        let at = cursor.at;
        let token = cursor.token()?;
        if let Some(parent) = open.last_mut() {
            if let Some(keys) = parent.keys.as_mut().filter(|_| parent.values_left.is_multiple_of(2)) {
                let Token::Str(key) = token else { return Err(MsgpackError::Key { at }) };
                if !keys.insert(key) {
                    return Err(MsgpackError::Duplicate { at });
                }
            }
            parent.values_left -= 1;
        }
        let child = match token {
            Token::Array(count) => Some(Open { values_left: u64::from(count), keys: None }),
            Token::Map(count) if count > PAIRS_MAX => return Err(MsgpackError::Pairs { at, count }),
            Token::Map(count) => Some(Open { values_left: 2 * u64::from(count), keys: Some(HashSet::new()) }),
            _ => None,
        };
        if let Some(child) = child {
            if open.len() == DEPTH_MAX {
                return Err(MsgpackError::Depth { at });
            }
            open.push(child);
        }
        while open.last().is_some_and(|innermost| innermost.values_left == 0) {
            open.pop();
        }
        if open.is_empty() {
            break;
        }
    }
    match cursor.at == bytes.len() {
        true => Ok(Value { bytes }),
        false => Err(MsgpackError::Trailing { at: cursor.at }),
    }
}

/// A map or array whose end has not been reached; a map's keys and values both count as values.
struct Open<'a> {
    values_left: u64,
    keys: Option<HashSet<&'a str>>,
}

/// A value in a document that [`parse`] accepted. Every accessor gives `None` for a value of another type.
#[derive(Clone, Copy)]
pub struct Value<'a> {
    /// Starts at this value; may go on after it.
    bytes: &'a [u8],
}

impl<'a> Value<'a> {
    /// A non-negative integer.
    #[must_use]
    pub fn uint(self) -> Option<u64> {
        match self.token()? {
            Token::Uint(value) => Some(value),
            _ => None,
        }
    }

    /// A float of either width, rounded to f32.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "rounding is what readers of this field do")]
    pub fn float(self) -> Option<f32> {
        match self.token()? {
            Token::F32(value) => Some(value),
            Token::F64(value) => Some(value as f32),
            _ => None,
        }
    }

    /// A string.
    #[must_use]
    pub fn text(self) -> Option<&'a str> {
        match self.token()? {
            Token::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The elements of an array.
    #[must_use]
    pub fn array(self) -> Option<Elements<'a>> {
        let mut cursor = Cursor { bytes: self.bytes, at: 0 };
        match cursor.token().ok()? {
            Token::Array(count) => Some(Elements { cursor, left: count }),
            _ => None,
        }
    }

    /// The pairs of a map.
    #[must_use]
    pub fn map(self) -> Option<Pairs<'a>> {
        let mut cursor = Cursor { bytes: self.bytes, at: 0 };
        match cursor.token().ok()? {
            Token::Map(count) => Some(Pairs(Elements { cursor, left: 2 * count })),
            _ => None,
        }
    }

    fn token(self) -> Option<Token<'a>> {
        Cursor { bytes: self.bytes, at: 0 }.token().ok()
    }
}

/// The elements of an array, in order.
#[derive(Clone)]
pub struct Elements<'a> {
    cursor: Cursor<'a>,
    left: u32,
}

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let value = Value { bytes: &self.cursor.bytes[self.cursor.at..] };
        self.cursor.skip()?;
        Some(value)
    }
}

/// The pairs of a map, in order.
#[derive(Clone)]
pub struct Pairs<'a>(Elements<'a>);

impl<'a> Iterator for Pairs<'a> {
    type Item = (&'a str, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        Some((self.0.next()?.text()?, self.0.next()?))
    }
}

/// One value, without what is inside it.
enum Token<'a> {
    Nil,
    Bool,
    Uint(u64),
    Negative,
    F32(f32),
    F64(f64),
    Str(&'a str),
    Bin,
    Array(u32),
    Map(u32),
}

#[derive(Clone)]
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Reads the next value's head, and all of it where it holds no others.
    fn token(&mut self) -> Result<Token<'a>, MsgpackError> {
        let start = self.at;
        let byte = self.take(start, 1)?[0];
        Ok(match byte {
            0x00..=0x7f => Token::Uint(u64::from(byte)),
            0x80..=0x8f => self.map(start, u32::from(byte & 0x0f))?,
            0x90..=0x9f => self.array(start, u32::from(byte & 0x0f))?,
            0xa0..=0xbf => self.text(start, usize::from(byte & 0x1f))?,
            0xc0 => Token::Nil,
            0xc2 | 0xc3 => Token::Bool,
            0xc4..=0xc6 => {
                let bytes = self.uint(start, 1 << (byte - 0xc4))?;
                self.take(start, bytes as usize)?;
                Token::Bin
            }
            0xca => Token::F32(f32::from_bits(self.uint(start, 4)? as u32)),
            0xcb => Token::F64(f64::from_bits(self.uint(start, 8)?)),
            0xcc..=0xcf => Token::Uint(self.uint(start, 1 << (byte - 0xcc))?),
            0xd0..=0xd3 => {
                let width = 1 << (byte - 0xd0);
                let raw = self.uint(start, width)?;
                // A non-negative number in a signed type is as good as in an unsigned one.
                match raw >> (8 * width - 1) {
                    0 => Token::Uint(raw),
                    _ => Token::Negative,
                }
            }
            0xd9..=0xdb => {
                let bytes = self.uint(start, 1 << (byte - 0xd9))?;
                self.text(start, bytes as usize)?
            }
            0xdc | 0xdd => {
                let count = self.uint(start, 2 << (byte - 0xdc))?;
                self.array(start, count as u32)?
            }
            0xde | 0xdf => {
                let count = self.uint(start, 2 << (byte - 0xde))?;
                self.map(start, count as u32)?
            }
            0xe0..=0xff => Token::Negative,
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => return Err(MsgpackError::Type { at: start, byte }),
        })
    }

    /// Moves past the next value with everything in it; `None` past the end.
    fn skip(&mut self) -> Option<()> {
        let mut pending = 1u64;
        while pending > 0 {
            pending -= 1;
            pending += match self.token().ok()? {
                Token::Array(count) => u64::from(count),
                Token::Map(count) => 2 * u64::from(count),
                _ => 0,
            };
        }
        Some(())
    }

    fn take(&mut self, start: usize, bytes: usize) -> Result<&'a [u8], MsgpackError> {
        let end = self.at.checked_add(bytes).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or(MsgpackError::Truncated { at: start })?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// A big-endian integer of `width` bytes.
    fn uint(&mut self, start: usize, width: usize) -> Result<u64, MsgpackError> {
        Ok(self.take(start, width)?.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    }

    fn text(&mut self, start: usize, bytes: usize) -> Result<Token<'a>, MsgpackError> {
        let raw = self.take(start, bytes)?;
        std::str::from_utf8(raw).map(Token::Str).map_err(|_| MsgpackError::Utf8 { at: start })
    }

    fn array(&self, start: usize, count: u32) -> Result<Token<'a>, MsgpackError> {
        self.check_count(start, count, 1)?;
        Ok(Token::Array(count))
    }

    fn map(&self, start: usize, count: u32) -> Result<Token<'a>, MsgpackError> {
        self.check_count(start, count, 2)?;
        Ok(Token::Map(count))
    }

    /// Every value takes at least one byte.
    fn check_count(&self, at: usize, count: u32, values_each: u64) -> Result<(), MsgpackError> {
        match u64::from(count) * values_each <= (self.bytes.len() - self.at) as u64 {
            true => Ok(()),
            false => Err(MsgpackError::Count { at, count }),
        }
    }
}

/// Writes what rmp-serde 1.3 writes for the same values: always the shortest form.
#[derive(Debug, Default)]
pub struct Encoder {
    out: Vec<u8>,
}

impl Encoder {
    /// An encoder with nothing written.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What was written.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.out
    }

    /// Writes a non-negative integer.
    #[expect(clippy::cast_possible_truncation, reason = "each arm's range fits its type")]
    pub fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.out.push(value as u8),
            0x80..=0xff => self.sized(0xcc, &(value as u8).to_be_bytes()),
            0x100..=0xffff => self.sized(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.sized(0xce, &(value as u32).to_be_bytes()),
            _ => self.sized(0xcf, &value.to_be_bytes()),
        }
    }

    /// Writes a float.
    pub fn float(&mut self, value: f32) {
        self.sized(0xca, &value.to_bits().to_be_bytes());
    }

    /// Writes a string of less than 4 GiB; a longer one could not be in a manifest.
    #[expect(clippy::cast_possible_truncation, reason = "each arm's range fits its type")]
    pub fn text(&mut self, text: &str) {
        match text.len() {
            bytes @ 0..=31 => self.out.push(0xa0 | bytes as u8),
            bytes @ 32..=0xff => self.sized(0xd9, &(bytes as u8).to_be_bytes()),
            bytes @ 0x100..=0xffff => self.sized(0xda, &(bytes as u16).to_be_bytes()),
            bytes => self.sized(0xdb, &(bytes as u32).to_be_bytes()),
        }
        self.out.extend_from_slice(text.as_bytes());
    }

    /// Writes the head of an array of `count` elements, which must follow.
    pub fn array(&mut self, count: usize) {
        self.head(count, 0x90, 0xdc);
    }

    /// Writes the head of a map of `count` pairs, which must follow.
    pub fn map(&mut self, count: usize) {
        self.head(count, 0x80, 0xde);
    }

    #[expect(clippy::cast_possible_truncation, reason = "each arm's range fits its type; counts stay below 2^32")]
    fn head(&mut self, count: usize, short: u8, long: u8) {
        match count {
            0..=15 => self.out.push(short | count as u8),
            16..=0xffff => self.sized(long, &(count as u16).to_be_bytes()),
            _ => self.sized(long + 1, &(count as u32).to_be_bytes()),
        }
    }

    fn sized(&mut self, marker: u8, payload: &[u8]) {
        self.out.push(marker);
        self.out.extend_from_slice(payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_and_strings_take_their_shortest_form() {
        for value in [0, 1, 127, 128, 255, 256, 65_535, 65_536, u64::from(u32::MAX), 1 << 32, u64::MAX] {
            let mut encoder = Encoder::new();
            encoder.uint(value);
            assert_eq!(encoder.out, rmp_serde::to_vec_named(&value).unwrap(), "{value}");
            assert_eq!(parse(&encoder.out).unwrap().uint(), Some(value));
        }
        for bytes in [0, 31, 32, 255, 256, 65_535, 65_536] {
            let text = "x".repeat(bytes);
            let mut encoder = Encoder::new();
            encoder.text(&text);
            assert_eq!(encoder.out, rmp_serde::to_vec_named(&text).unwrap(), "{bytes}");
            assert_eq!(parse(&encoder.out).unwrap().text(), Some(&*text));
        }
        for count in [0, 15, 16, 65_535, 65_536] {
            let mut encoder = Encoder::new();
            encoder.array(count);
            (0..count).for_each(|_| encoder.uint(7));
            assert_eq!(encoder.out, rmp_serde::to_vec_named(&vec![7u8; count]).unwrap(), "{count}");
            assert_eq!(parse(&encoder.out).unwrap().array().unwrap().count(), count);
        }
    }

    #[test]
    fn malformed_documents_are_refused_wherever_the_fault_is() {
        let cases: &[(&[u8], MsgpackError)] = &[
            (b"", MsgpackError::Truncated { at: 0 }),
            (b"\xc1", MsgpackError::Type { at: 0, byte: 0xc1 }),
            (b"\xd4\x00\x00", MsgpackError::Type { at: 0, byte: 0xd4 }),
            (b"\xa2a", MsgpackError::Truncated { at: 0 }),
            (b"\xa1\xff", MsgpackError::Utf8 { at: 0 }),
            (b"\xdb\xff\xff\xff\xff", MsgpackError::Truncated { at: 0 }),
            (b"\xdd\xff\xff\xff\xff\x00", MsgpackError::Count { at: 0, count: u32::MAX }),
            (b"\xdf\xff\xff\xff\xff\x00", MsgpackError::Count { at: 0, count: u32::MAX }),
            (b"\x81\x01\x02", MsgpackError::Key { at: 1 }),
            (b"\x82\xa1a\x01\xa1a\x02", MsgpackError::Duplicate { at: 4 }),
            (b"\x81\xa1a\x82\xa1b\x01\xa1b\x02", MsgpackError::Duplicate { at: 7 }),
            (b"\x80\x00", MsgpackError::Trailing { at: 1 }),
            (b"\x91\x91\x91\x91\x91\x91\x91\x91\x91\x00", MsgpackError::Depth { at: 8 }),
        ];
        for (bytes, expected) in cases {
            assert_eq!(parse(bytes).err(), Some(*expected), "{bytes:02x?}");
        }
        assert!(parse(b"\x91\x91\x91\x91\x91\x91\x91\x91\x00").is_ok());
    }

    #[test]
    fn values_of_the_wrong_type_are_none() {
        let document =
            parse(b"\x86\xa1n\xc0\xa1b\xc3\xa1i\xff\xa1d\xcb\x3f\xe0\0\0\0\0\0\0\xa1x\xc4\x01\x00\xa1e\x90").unwrap();
        let pairs: Vec<_> = document.map().unwrap().collect();
        assert_eq!(pairs.iter().map(|(key, _)| *key).collect::<String>(), "nbidxe");
        for (key, value) in pairs {
            assert_eq!(value.uint(), None, "{key}");
            assert_eq!(value.text(), None, "{key}");
            assert_eq!(value.float().is_some(), key == "d");
            assert_eq!(value.array().is_some(), key == "e");
        }
    }
}
