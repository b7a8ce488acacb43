//! How long a conversion will take at least: from a sample of its reading and of its encoding on this machine.
//!
//! Writing is not sampled, since a dry run writes nothing; on a slow disk it is what counts, and the estimate says so.

use std::fmt;
use std::time::Instant;

use minnow_common::units::HumanBytes;
use serde_json::{Value, json};

use crate::pipeline::sink::{Sink, SinkError};
use crate::pipeline::source::Unit;
use crate::pipeline::{self, Content, Job, PipelineError};
use crate::plan::{Planned, Work};
use crate::progress::Progress;
use crate::signals::Signals;

/// Bytes of the source that are read and transformed to see how fast that goes.
const SAMPLE_BYTES: u64 = 64 << 20;

/// What a sample says about the whole.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimate {
    /// Bytes of the source that were worked off.
    sample_bytes: u64,
    sample_seconds: f64,
    /// All that there is to be worked off.
    source_bytes: u64,
}

impl Estimate {
    /// Runs some tensors of `job`, preferably such as make the most of its work, and drops the results.
    pub(super) fn of(job: &Job<'_>) -> Result<Self, PipelineError> {
        let is_typical = |tensor: &&Planned| tensor.work != Work::Copy;
        let any_typical = job.plan.iter().any(|tensor| is_typical(&tensor));
        let mut sample: Vec<Planned> = Vec::new();
        let mut sample_bytes = 0;
        for tensor in job.plan.iter().filter(|tensor| !any_typical || is_typical(tensor)) {
            if sample_bytes >= SAMPLE_BYTES {
                break;
            }
            sample_bytes += tensor.source_bytes();
            sample.push(tensor.clone());
        }
        let started = Instant::now();
        pipeline::run(
            Job { plan: &sample, first: 0, ..*job },
            &mut Nowhere,
            &Signals::default(),
            &Progress::new(0, false),
        )?;
        let source_bytes = job.plan.iter().map(Planned::source_bytes).sum();
        Ok(Self { sample_bytes, sample_seconds: started.elapsed().as_secs_f64(), source_bytes })
    }

    /// Bytes of source a second.
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn bytes_per_second(&self) -> f64 {
        self.sample_bytes as f64 / self.sample_seconds.max(1e-6)
    }

    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    fn seconds(&self) -> f64 {
        self.source_bytes as f64 / self.bytes_per_second()
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "seconds_min": self.seconds(),
            "sample_bytes": self.sample_bytes,
            "sample_bytes_per_second": self.bytes_per_second(),
            "not_counted": "writing",
        })
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "about {:.1} s, if writing keeps up: {} were read and converted at {:.2} GB/s of source just now, of {} in all",
            self.seconds(),
            HumanBytes(self.sample_bytes),
            self.bytes_per_second() / 1e9,
            HumanBytes(self.source_bytes)
        )
    }
}

/// A sink that keeps nothing.
struct Nowhere;

impl Sink for Nowhere {
    fn write(&mut self, _tensor: &Planned, _unit: &Unit, _content: Content<'_>) -> Result<(), SinkError> {
        Ok(())
    }
}
