//! AMX: products of whole tiles, by `asm!`, for the intrinsics are not stable.
//!
//! A tile register holds sixteen lines. With weights as the left and a panel as the right operand, `tdpbf16ps` adds the
//! products of sixteen features with sixteen rows over 32 columns, pair by pair in ascending order, to a [`Tile`]; `tdpbssd`
//! those of codes over 64 columns, four by four, to [`Dots`]. Four sums at a time are kept in registers, which hides the
//! latency of a product.

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

    fn product(_session: &Session, c: &mut [Tile], weights: &Weights<'_>, panels: &[&[Line]], job: Job) {
        // SAFETY: a session exists, so the CPU has AMX and its registers are configured as sixteen lines.
        unsafe { bf16::product(c, weights, panels, job) }
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

    fn add_group(session: &Session, sums: &mut [Tile], weights: &Codes<'_>, rows: &[RowCodes<'_>], dots: &mut [Dots]) {
        let tiles = weights.scales.len();
        let job = Job { tiles, steps: CODE_STEPS, rows: EDGE, is_fresh: true };
        let dots = &mut dots[..sums.len()];
        let lines = Weights::Lines(weights.lines);
        // SAFETY: a session exists, so the CPU has AMX and its registers are configured as sixteen lines.
        unsafe {
            match rows {
                [rows] => int8::product(dots, &lines, &[rows.lines], job),
                [first, second] => int8::product(dots, &lines, &[first.lines, second.lines], job),
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
macro_rules! products_by {
    ($module:ident, $multiply:literal, $sums:ty) => {
        mod $module {
            use std::arch::asm;

            use super::super::avx512::Source;
            use super::super::{EDGE, Job, Line, Weights};
            use super::LINE_BYTES;

            /// Adds the products of all feature tiles with one or two panels to `c`, `[panel][tile]`, or writes them.
            ///
            /// # Safety
            /// Tile registers are configured as sixteen lines.
            pub(super) unsafe fn product(c: &mut [$sums], weights: &Weights<'_>, panels: &[&[Line]], job: Job) {
                let Job { tiles, steps, is_fresh, .. } = job;
                assert!(c.len() == panels.len() * tiles && steps > 0);
                assert!(panels.iter().all(|panel| panel.len() >= steps * EDGE));
                let source = |tile| Source::of(weights, tile, tiles, steps);
                let mut tile = 0;
                // SAFETY: the caller's promise. `source` vouches for the lines of each feature tile that is asked of it, and
                // feature tiles lie one distance apart; panels and `c` were checked above.
                unsafe {
                    match panels {
                        [panel] => {
                            while tile + 4 <= tiles {
                                four_by_one(&mut c[tile..tile + 4], [0, 1, 2, 3].map(|next| source(tile + next)), panel, job);
                                tile += 4;
                            }
                        }
                        [first, second] => {
                            let (c0, c1) = c.split_at_mut(tiles);
                            while tile + 2 <= tiles {
                                let c = [c0[tile..tile + 2].as_mut_ptr(), c1[tile..tile + 2].as_mut_ptr()];
                                two_by_two(c, [source(tile), source(tile + 1)], [first, second], job);
                                tile += 2;
                            }
                        }
                        _ => unreachable!("there are one or two panels"),
                    }
                    for tile in tile..tiles {
                        for (panel, c) in panels.iter().zip(c.chunks_exact_mut(tiles)) {
                            one_by_one(&mut c[tile], source(tile), panel, steps, is_fresh);
                        }
                    }
                }
            }

            /// Four feature tiles with one panel.
            ///
            /// # Safety
            /// Tile registers are configured; `c` is four tiles, the sources and the panel have `job.steps` steps, at least one.
            unsafe fn four_by_one(c: &mut [$sums], weights: [Source; 4], panel: &[Line], job: Job) {
                debug_assert_eq!(c.len(), 4);
                let [w0, w1, w2, w3] = weights;
                // SAFETY: the caller's promise. Tile loads read sixteen lines of 64 bytes from an address on, a stride apart.
                unsafe {
                    asm!(
                        "test {fresh}, {fresh}",
                        "jnz 2f",
                        "tileloadd tmm0, [{c} + {line}]",
                        "tileloadd tmm1, [{c} + {line} + 1024]",
                        "tileloadd tmm2, [{c} + {line} + 2048]",
                        "tileloadd tmm3, [{c} + {line} + 3072]",
                        "jmp 3f",
                        "2:",
                        "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                        "3:",
                        "tileloadd tmm4, [{x} + {line}]",
                        "tileloadd tmm5, [{w0} + {row}]",
                        concat!($multiply, " tmm0, tmm5, tmm4"),
                        "tileloadd tmm6, [{w1} + {row}]",
                        concat!($multiply, " tmm1, tmm6, tmm4"),
                        "tileloadd tmm7, [{w2} + {row}]",
                        concat!($multiply, " tmm2, tmm7, tmm4"),
                        "tileloadd tmm5, [{w3} + {row}]",
                        concat!($multiply, " tmm3, tmm5, tmm4"),
                        "add {w0}, {step}",
                        "add {w1}, {step}",
                        "add {w2}, {step}",
                        "add {w3}, {step}",
                        "add {x}, 1024",
                        "dec {steps}",
                        "jnz 3b",
                        "tilestored [{c} + {line}], tmm0",
                        "tilestored [{c} + {line} + 1024], tmm1",
                        "tilestored [{c} + {line} + 2048], tmm2",
                        "tilestored [{c} + {line} + 3072], tmm3",
                        fresh = in(reg) usize::from(job.is_fresh),
                        c = in(reg) c.as_mut_ptr(),
                        line = in(reg) LINE_BYTES,
                        x = inout(reg) panel.as_ptr() => _,
                        w0 = inout(reg) w0.first => _,
                        w1 = inout(reg) w1.first => _,
                        w2 = inout(reg) w2.first => _,
                        w3 = inout(reg) w3.first => _,
                        row = in(reg) w0.feature_bytes,
                        step = in(reg) w0.step_bytes,
                        steps = inout(reg) job.steps => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }

            /// Two feature tiles with two panels; `c`: two tiles for each panel.
            ///
            /// # Safety
            /// As [`four_by_one`].
            unsafe fn two_by_two(c: [*mut $sums; 2], weights: [Source; 2], panels: [&[Line]; 2], job: Job) {
                let ([c0, c1], [w0, w1]) = (c, weights);
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
                        "tileloadd tmm4, [{x0} + {line}]",
                        "tileloadd tmm5, [{w0} + {row}]",
                        concat!($multiply, " tmm0, tmm5, tmm4"),
                        "tileloadd tmm6, [{w1} + {row}]",
                        concat!($multiply, " tmm1, tmm6, tmm4"),
                        "tileloadd tmm7, [{x1} + {line}]",
                        concat!($multiply, " tmm2, tmm5, tmm7"),
                        concat!($multiply, " tmm3, tmm6, tmm7"),
                        "add {w0}, {step}",
                        "add {w1}, {step}",
                        "add {x0}, 1024",
                        "add {x1}, 1024",
                        "dec {steps}",
                        "jnz 3b",
                        "tilestored [{c0} + {line}], tmm0",
                        "tilestored [{c0} + {line} + 1024], tmm1",
                        "tilestored [{c1} + {line}], tmm2",
                        "tilestored [{c1} + {line} + 1024], tmm3",
                        fresh = in(reg) usize::from(job.is_fresh),
                        c0 = in(reg) c0,
                        c1 = in(reg) c1,
                        line = in(reg) LINE_BYTES,
                        x0 = inout(reg) panels[0].as_ptr() => _,
                        x1 = inout(reg) panels[1].as_ptr() => _,
                        w0 = inout(reg) w0.first => _,
                        w1 = inout(reg) w1.first => _,
                        row = in(reg) w0.feature_bytes,
                        step = in(reg) w0.step_bytes,
                        steps = inout(reg) job.steps => _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }

            /// One feature tile with one panel.
            ///
            /// # Safety
            /// As [`four_by_one`].
            unsafe fn one_by_one(c: &mut $sums, weights: Source, panel: &[Line], steps: usize, is_fresh: bool) {
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
                        "tileloadd tmm4, [{x} + {line}]",
                        "tileloadd tmm5, [{w} + {row}]",
                        concat!($multiply, " tmm0, tmm5, tmm4"),
                        "add {w}, {step}",
                        "add {x}, 1024",
                        "dec {steps}",
                        "jnz 3b",
                        "tilestored [{c} + {line}], tmm0",
                        fresh = in(reg) usize::from(is_fresh),
                        c = in(reg) &raw mut *c,
                        line = in(reg) LINE_BYTES,
                        x = inout(reg) panel.as_ptr() => _,
                        w = inout(reg) weights.first => _,
                        row = in(reg) weights.feature_bytes,
                        step = in(reg) weights.step_bytes,
                        steps = inout(reg) steps => _,
                        out("tmm0") _, out("tmm4") _, out("tmm5") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

products_by!(bf16, "tdpbf16ps", super::super::Tile);
products_by!(int8, "tdpbssd", super::super::Dots);
