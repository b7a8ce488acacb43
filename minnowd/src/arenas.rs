//! How many arenas the C library's allocator may keep.

/// Arenas of all threads together. glibc's own limit, eight for each core, lets every thread that answers clients grow
/// and fragment an arena of its own: in the mixed load test of `tests/daemon/soak.rs` a third more resident memory at the
/// same speed, and slow growth for minutes. What computes allocates little, and rarely at the same time.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const ARENAS: libc::c_int = 2;

/// Makes threads share a few arenas. Does nothing where the allocator is not glibc's, or where `MALLOC_ARENA_MAX` says
/// how many there shall be.
///
/// # Safety
/// No other thread runs: `mallopt` is not safe beside other calls of the allocator.
pub unsafe fn share() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    if std::env::var_os("MALLOC_ARENA_MAX").is_none() {
        // SAFETY: a parameter of the allocator, set while no other thread uses it. A refusal leaves its default.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, ARENAS) };
    }
}
