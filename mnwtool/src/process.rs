//! What the system says about this process.

/// The most memory this process has had resident at once, in bytes; 0 where the system does not tell.
pub(crate) fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    peak_in(&status).unwrap_or(0)
}

/// The line `VmHWM: N kB` of `/proc/PID/status` (proc(5)).
fn peak_in(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_read_in_bytes() {
        assert_eq!(peak_in("Name:\tx\nVmHWM:\t   12 kB\nVmRSS:\t 8 kB\n"), Some(12 * 1024));
        assert_eq!(peak_in("Name:\tx\n"), None);
        assert!(peak_rss_bytes() > 0);
    }
}
