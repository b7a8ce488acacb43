//! Newtypes for numbers that must not be mixed up.

use std::fmt;

/// A byte position from the start of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileOffset(pub u64);

impl FileOffset {
    /// The position `bytes` further on, or `None` past 2^64.
    #[must_use]
    pub fn checked_add(self, bytes: u64) -> Option<Self> {
        self.0.checked_add(bytes).map(Self)
    }

    /// The next multiple of `alignment` (a power of two) at or after this position, or `None` past 2^64.
    #[must_use]
    pub fn checked_align_up(self, alignment: u64) -> Option<Self> {
        debug_assert!(alignment.is_power_of_two());
        self.0.checked_next_multiple_of(alignment).map(Self)
    }
}

impl fmt::Display for FileOffset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A number of bytes, shown as a person would say it: `512 B`, `16.4 MiB`, `9.14 GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HumanBytes(pub u64);

impl fmt::Display for HumanBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let digits = if value < 10.0 { 2 } else { 1 };
        write!(f, "{value:.digits$} {}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_read_like_words() {
        assert_eq!(HumanBytes(0).to_string(), "0 B");
        assert_eq!(HumanBytes(1023).to_string(), "1023 B");
        assert_eq!(HumanBytes(1536).to_string(), "1.50 KiB");
        assert_eq!(HumanBytes(9_799_130_624).to_string(), "9.13 GiB");
        assert_eq!(HumanBytes(u64::MAX).to_string(), "16384.0 PiB");
    }

    #[test]
    fn alignment_never_wraps() {
        assert_eq!(FileOffset(4096).checked_align_up(4096), Some(FileOffset(4096)));
        assert_eq!(FileOffset(4097).checked_align_up(4096), Some(FileOffset(8192)));
        assert_eq!(FileOffset(u64::MAX).checked_align_up(4096), None);
        assert_eq!(FileOffset(u64::MAX).checked_add(1), None);
    }
}
