//! Outputs that end in a loop: the same tokens over and over, until the limit cuts them.

/// The longest unit that counts as repeated, in tokens: two blocks.
const UNIT_MAX: usize = 64;
/// How often a unit must stand at the end.
const TIMES_MIN: usize = 4;
/// Tokens that the loop must cover, so that rulers, ellipses and short lists are none: a block and a half.
const COVERED_MIN: usize = 48;

/// Tokens at the end of `tokens` that are one unit of at most [`UNIT_MAX`] tokens again and again; 0 if they are fewer
/// than [`COVERED_MIN`] or [`TIMES_MIN`] units. The last unit may be cut.
pub(super) fn repeated_tail(tokens: &[u32]) -> usize {
    let covered = |unit: usize| {
        let equal = tokens.iter().rev().zip(tokens.iter().rev().skip(unit)).take_while(|(a, b)| a == b).count();
        (unit + equal >= COVERED_MIN.max(TIMES_MIN * unit)).then_some(unit + equal)
    };
    (1..=UNIT_MAX).filter_map(covered).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `lead` different tokens, then the first `length` of an endless repetition of `unit` others.
    fn output(lead: u32, unit: u32, length: u32) -> Vec<u32> {
        (1000..1000 + lead).chain((0..length).map(|index| index % unit)).collect()
    }

    #[test]
    fn a_loop_is_found_whatever_its_unit_and_where_it_is_cut() {
        for unit in 1..=UNIT_MAX as u32 {
            for length in [4 * unit, 4 * unit + unit / 2, 9 * unit].map(|length| length.max(48)) {
                assert_eq!(repeated_tail(&output(100, unit, length)), length as usize, "unit {unit}");
            }
        }
    }

    #[test]
    fn what_is_short_or_rare_or_over_is_no_loop() {
        assert_eq!(repeated_tail(&[]), 0);
        assert_eq!(repeated_tail(&output(10, 1, 47)), 0, "a ruler of 47 dashes");
        assert_eq!(repeated_tail(&output(10, 20, 79)), 0, "less than four times");
        assert_eq!(repeated_tail(&output(500, 1, 0)), 0, "nothing twice");
        let mut over = output(0, 3, 300);
        over.extend([7, 8, 9]);
        assert_eq!(repeated_tail(&over), 0, "it went on with something else");
    }
}
