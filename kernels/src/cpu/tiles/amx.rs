//! AMX: products of whole tiles, by `asm!`, for the intrinsics are not stable.
//!
//! A tile register holds sixteen lines. With weights as the left and a panel as the right operand, `tdpbf16ps` adds the
//! products of sixteen features with sixteen rows over 32 columns, pair by pair in ascending order, to a [`Tile`]; `tdpbssd`
//! those of codes over 64 columns, four by four, to [`Dots`]. Two sums or four at a time are kept in registers; what else is
//! to be done, such as decoding the next weights, is done between the steps and hides the latency of the products.

use std::arch::asm;
use std::arch::x86_64::{__cpuid_count, __get_cpuid_max, _xgetbv};
use std::marker::PhantomData;
use std::sync::OnceLock;

use super::wide::CodeBytes;
use super::{
    Avx512Bf16, Avx512Bw, CODE_STEPS, CodeEngine, Codes, Dots, EDGE, Engine, Job, Line, RowCodes, STEP, Tile, Weights,
};

/// Proof that this CPU has AMX with BF16 and INT8, that the system lets this process use it, and that the CPU has all
/// of [`Avx512Bf16`]. The only way to get one is [`Amx::detect`].
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Amx(Avx512Bf16);

impl Amx {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        // The answer never changes, and asking the system is slow.
        static IS_USABLE: OnceLock<bool> = OnceLock::new();
        let vectors = Avx512Bf16::detect()?;
        IS_USABLE.get_or_init(|| has_amx() && may_use_tiles()).then_some(Self(vectors))
    }
}

/// Whether the CPU has the instructions, and the system saves the registers.
fn has_amx() -> bool {
    const LEAF: u32 = 7;
    /// AMX-BF16, AMX-TILE and AMX-INT8, in EDX.
    const FEATURES: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    /// Tile configuration and tile data, in XCR0.
    const STATE: u64 = 1 << 17 | 1 << 18;
    if __get_cpuid_max(0).0 < LEAF || __cpuid_count(LEAF, 0).edx & FEATURES != FEATURES {
        return false;
    }
    if !std::arch::is_x86_feature_detected!("xsave") {
        return false;
    }
    // SAFETY: the CPU has XSAVE and the system has enabled it: that is what detection of the feature asks for.
    unsafe { _xgetbv(0) & STATE == STATE }
}

/// Asks Linux for the use of tile registers by this process; it keeps no room for them in threads unless asked.
fn may_use_tiles() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    if !cfg!(target_os = "linux") {
        return false;
    }
    let result: i64;
    // SAFETY: a system call that takes two numbers and touches no memory of ours; the kernel leaves all registers but
    // these three as they are.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// All eight tile registers as sixteen lines. `ldtilecfg` reads these 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    lines: [u8; 16],
}

static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    line_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    lines: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};
const _: () = assert!(size_of::<Configuration>() == 64);

/// Tile registers of this thread are configured while this lives. It stays on its thread.
pub(in crate::cpu) struct Session {
    wide: Avx512Bw,
    thread: PhantomData<*const ()>,
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: a session exists, so the CPU has AMX; nobody else relies on what the registers hold.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
    }
}

impl Engine for Amx {
    const READS_ROWS: bool = true;

    type Session = Session;

    fn vectors(self) -> Avx512Bf16 {
        self.0
    }

    fn begin(self) -> Session {
        // SAFETY: `self` exists, so the CPU has AMX and the system allows it; the configuration is 64 valid bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly, preserves_flags));
        }
        Session { wide: *self.0, thread: PhantomData }
    }

    fn product(
        _session: &Session,
        c: &mut [Tile],
        weights: &Weights<'_>,
        panels: &[&[Line]],
        job: Job,
        between: impl FnMut(usize),
    ) {
        // SAFETY: a session exists, so the CPU has AMX and its registers are configured as sixteen lines.
        unsafe { bf16::product(c, weights, panels, job, between) }
    }

    fn multiply_only(self, rounds: usize) -> usize {
        let _session = self.begin();
        if rounds > 0 {
            // SAFETY: a session exists, so the registers are configured; no memory is touched.
            unsafe {
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tilezero tmm4", "tilezero tmm5",
                    "2:",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tdpbf16ps tmm1, tmm4, tmm5",
                    "tdpbf16ps tmm2, tmm4, tmm5",
                    "tdpbf16ps tmm3, tmm4, tmm5",
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) rounds => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                    options(nostack, nomem),
                );
            }
        }
        rounds * 4 * EDGE * EDGE * STEP * 2
    }
}

impl CodeEngine for Amx {
    const FORM: CodeBytes = CodeBytes::Signed;

    type Session = Session;

    fn wide(self) -> Avx512Bw {
        *self.0
    }

    fn begin_codes(self) -> Session {
        self.begin()
    }

    fn add_group(
        session: &Session,
        sums: &mut [Tile],
        weights: &Codes<'_>,
        rows: &[RowCodes<'_>],
        dots: &mut [Dots],
        between: impl FnMut(usize),
    ) {
        let tiles = weights.scales.len();
        let job = Job { tiles, steps: CODE_STEPS, rows: EDGE, is_fresh: true };
        let dots = &mut dots[..sums.len()];
        let lines = Weights::Lines(weights.lines);
        // SAFETY: a session exists, so the CPU has AMX and its registers are configured as sixteen lines.
        unsafe {
            match rows {
                [rows] => int8::product(dots, &lines, &[rows.lines], job, between),
                [first, second] => int8::product(dots, &lines, &[first.lines, second.lines], job, between),
                _ => unreachable!("there are one or two panels"),
            }
        }
        for ((sums, dots), rows) in sums.chunks_exact_mut(tiles).zip(dots.chunks_exact(tiles)).zip(rows) {
            for ((sum, dots), scales) in sums.iter_mut().zip(dots).zip(weights.scales) {
                session.wide.add_dots(sum, dots, scales, rows.scales);
            }
        }
    }
}

const LINE_BYTES: usize = size_of::<Line>();

/// Products of every shape, by an instruction that multiplies two tile registers and adds to a third.
///
/// Sums stay in tile registers from step to step while other code runs between: nothing but `asm!` of this module names those
/// registers, and the compiler, which does not know them, makes no code of its own that does.
macro_rules! products_by {
    ($module:ident, $multiply:literal, $sums:ty) => {
        mod $module {
            use std::arch::asm;

            use super::super::avx512::Source;
            use super::super::{EDGE, Job, Line, Weights};
            use super::LINE_BYTES;

            /// Adds the products of all feature tiles with one or two panels to `c`, `[panel][tile]`, or writes them.
            /// `between` is called after each step of the first tiles.
            ///
            /// # Safety
            /// Tile registers are configured as sixteen lines.
            pub(super) unsafe fn product(
                c: &mut [$sums],
                weights: &Weights<'_>,
                panels: &[&[Line]],
                job: Job,
                between: impl FnMut(usize),
            ) {
                let Job { tiles, steps, .. } = job;
                assert!(c.len() == panels.len() * tiles && steps > 0);
                assert!(panels.iter().all(|panel| panel.len() >= steps * EDGE));
                // SAFETY: the caller's promise; panels and `c` are checked.
                unsafe {
                    if tiles > 0 {
                        some_tiles(c, weights, panels, job, 0, between);
                    }
                    for first in (2..tiles).step_by(2) {
                        some_tiles(c, weights, panels, job, first, |_| ());
                    }
                }
            }

            /// [`product`] for two feature tiles from `first` on, or the last alone.
            ///
            /// # Safety
            /// As there; `c` and the panels are as long as `job` says.
            unsafe fn some_tiles(
                c: &mut [$sums],
                weights: &Weights<'_>,
                panels: &[&[Line]],
                job: Job,
                first: usize,
                mut between: impl FnMut(usize),
            ) {
                let Job { tiles, steps, is_fresh, .. } = job;
                let source = |tile| Source::of(weights, tile, tiles, steps);
                let (c0, c1) = c.split_at_mut(tiles);
                // SAFETY: the caller's promise. `source` vouches for the lines of each feature tile that is asked of it.
                unsafe {
                    if first + 1 < tiles {
                        let sources = [source(first), source(first + 1)];
                        match panels {
                            [panel] => two_by_one(&mut c0[first..first + 2], sources, panel, job, between),
                            [x0, x1] => {
                                let c = [c0[first..first + 2].as_mut_ptr(), c1[first..first + 2].as_mut_ptr()];
                                two_by_two(c, sources, [x0, x1], job, between);
                            }
                            _ => unreachable!("there are one or two panels"),
                        }
                    } else {
                        let source = source(first);
                        one_by_one(&mut c0[first], source, panels[0], steps, is_fresh, &mut between);
                        if let Some(panel) = panels.get(1) {
                            one_by_one(&mut c1[first], source, panel, steps, is_fresh, |_| ());
                        }
                    }
                }
            }

            /// Two feature tiles with two panels; `c`: two tiles for each panel.
            ///
            /// # Safety
            /// Tile registers are configured; `c` is two tiles for each panel, the sources and the panels have `job.steps` steps.
            unsafe fn two_by_two(
                [c0, c1]: [*mut $sums; 2],
                [w0, w1]: [Source; 2],
                [x0, x1]: [&[Line]; 2],
                job: Job,
                mut between: impl FnMut(usize),
            ) {
                // SAFETY: the caller's promise. Tile loads read sixteen lines of 64 bytes from an address on, a stride apart.
                unsafe {
                    asm!(
                        "test {fresh}, {fresh}",
                        "jnz 2f",
                        "tileloadd tmm0, [{c0} + {line}]",
                        "tileloadd tmm1, [{c0} + {line} + 1024]",
                        "tileloadd tmm2, [{c1} + {line}]",
                        "tileloadd tmm3, [{c1} + {line} + 1024]",
                        "jmp 3f",
                        "2:",
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "3:",
                        fresh = in(reg) usize::from(job.is_fresh),
                        c0 = in(reg) c0,
                        c1 = in(reg) c1,
                        line = in(reg) LINE_BYTES,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        options(nostack, readonly),
                    );
                    for step in 0..job.steps {
                        asm!(
                            "tileloadd tmm4, [{x0} + {line}]",
                            "tileloadd tmm5, [{w0} + {row}]",
                            concat!($multiply, " tmm0, tmm5, tmm4"),
                            "tileloadd tmm6, [{w1} + {row}]",
                            concat!($multiply, " tmm1, tmm6, tmm4"),
                            "tileloadd tmm7, [{x1} + {line}]",
                            concat!($multiply, " tmm2, tmm5, tmm7"),
                            concat!($multiply, " tmm3, tmm6, tmm7"),
                            line = in(reg) LINE_BYTES,
                            x0 = in(reg) x0.as_ptr().add(step * EDGE),
                            x1 = in(reg) x1.as_ptr().add(step * EDGE),
                            w0 = in(reg) w0.at(step),
                            w1 = in(reg) w1.at(step),
                            row = in(reg) w0.feature_bytes,
                            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                            options(nostack, readonly, preserves_flags),
                        );
                        between(step);
                    }
                    asm!(
                        "tilestored [{c0} + {line}], tmm0",
                        "tilestored [{c0} + {line} + 1024], tmm1",
                        "tilestored [{c1} + {line}], tmm2",
                        "tilestored [{c1} + {line} + 1024], tmm3",
                        c0 = in(reg) c0,
                        c1 = in(reg) c1,
                        line = in(reg) LINE_BYTES,
                        options(nostack, preserves_flags),
                    );
                }
            }

            /// Two feature tiles with one panel.
            ///
            /// # Safety
            /// As [`two_by_two`].
            unsafe fn two_by_one(
                c: &mut [$sums],
                [w0, w1]: [Source; 2],
                panel: &[Line],
                job: Job,
                mut between: impl FnMut(usize),
            ) {
                debug_assert_eq!(c.len(), 2);
                let c = c.as_mut_ptr();
                // SAFETY: the caller's promise. Tile loads read sixteen lines of 64 bytes from an address on, a stride apart.
                unsafe {
                    asm!(
                        "test {fresh}, {fresh}",
                        "jnz 2f",
                        "tileloadd tmm0, [{c} + {line}]",
                        "tileloadd tmm1, [{c} + {line} + 1024]",
                        "jmp 3f",
                        "2:",
                        "tilezero tmm0", "tilezero tmm1",
                        "3:",
                        fresh = in(reg) usize::from(job.is_fresh),
                        c = in(reg) c,
                        line = in(reg) LINE_BYTES,
                        out("tmm0") _, out("tmm1") _,
                        options(nostack, readonly),
                    );
                    for step in 0..job.steps {
                        asm!(
                            "tileloadd tmm4, [{x} + {line}]",
                            "tileloadd tmm5, [{w0} + {row}]",
                            concat!($multiply, " tmm0, tmm5, tmm4"),
                            "tileloadd tmm6, [{w1} + {row}]",
                            concat!($multiply, " tmm1, tmm6, tmm4"),
                            line = in(reg) LINE_BYTES,
                            x = in(reg) panel.as_ptr().add(step * EDGE),
                            w0 = in(reg) w0.at(step),
                            w1 = in(reg) w1.at(step),
                            row = in(reg) w0.feature_bytes,
                            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                            options(nostack, readonly, preserves_flags),
                        );
                        between(step);
                    }
                    asm!(
                        "tilestored [{c} + {line}], tmm0",
                        "tilestored [{c} + {line} + 1024], tmm1",
                        c = in(reg) c,
                        line = in(reg) LINE_BYTES,
                        options(nostack, preserves_flags),
                    );
                }
            }

            /// One feature tile with one panel.
            ///
            /// # Safety
            /// As [`two_by_two`], with one tile.
            unsafe fn one_by_one(
                c: &mut $sums,
                weights: Source,
                panel: &[Line],
                steps: usize,
                is_fresh: bool,
                mut between: impl FnMut(usize),
            ) {
                // SAFETY: the caller's promise. Tile loads read sixteen lines of 64 bytes from an address on, a stride apart.
                unsafe {
                    asm!(
                        "test {fresh}, {fresh}",
                        "jnz 2f",
                        "tileloadd tmm0, [{c} + {line}]",
                        "jmp 3f",
                        "2:",
                        "tilezero tmm0",
                        "3:",
                        fresh = in(reg) usize::from(is_fresh),
                        c = in(reg) &raw const *c,
                        line = in(reg) LINE_BYTES,
                        out("tmm0") _,
                        options(nostack, readonly),
                    );
                    for step in 0..steps {
                        asm!(
                            "tileloadd tmm4, [{x} + {line}]",
                            "tileloadd tmm5, [{w} + {row}]",
                            concat!($multiply, " tmm0, tmm5, tmm4"),
                            line = in(reg) LINE_BYTES,
                            x = in(reg) panel.as_ptr().add(step * EDGE),
                            w = in(reg) weights.at(step),
                            row = in(reg) weights.feature_bytes,
                            out("tmm0") _, out("tmm4") _, out("tmm5") _,
                            options(nostack, readonly, preserves_flags),
                        );
                        between(step);
                    }
                    asm!(
                        "tilestored [{c} + {line}], tmm0",
                        c = in(reg) &raw mut *c,
                        line = in(reg) LINE_BYTES,
                        options(nostack, preserves_flags),
                    );
                }
            }
        }
    };
}

products_by!(bf16, "tdpbf16ps", super::super::Tile);
products_by!(int8, "tdpbssd", super::super::Dots);
