//! `minnowd verify`: runs the same tokens through this backend and another, and compares them layer by layer.
//!
//! Two passes: all blocks in one forward, then the last block alone on top of cached pages. Exit code 1 if they differ
//! by more than rounding explains.

use std::process::ExitCode;

use minnow_common::BLOCK;
use serde_json::json;

use crate::config::{DecodingDefaults, Device, ModelSource};
use crate::model::verify::{VerifyReport, compare};
use crate::session::{Opened, Session};

/// Positions of the last block that are masks, as in the middle of a refinement.
const MASKED: usize = 20;

/// Run through both backends where the user names no text.
const SAMPLE: &str = "Once upon a time there was a sheep who lived in a garden and loved to eat cake. What is 17 + 25? \
                      The capital of France is Paris. {\"name\": \"Ada\", \"age\": 36} apple, banana, cherry; 3 1 2.";

/// Compares the two backends and prints the report.
pub fn run(source: &ModelSource, against: Device, text: Option<String>, as_json: bool) -> anyhow::Result<ExitCode> {
    let opened = Opened::new(source)?;
    let mut subject = opened.backend(source, source.device, 1)?;
    let mut reference = opened.backend(source, against, 1)?;
    let session = opened.session(source, &DecodingDefaults::default(), &*subject)?;
    let tokens = tokens(&session, text.as_deref().unwrap_or(SAMPLE))?;
    let tolerance = f64::max(subject.tolerance(), reference.tolerance());
    let report = compare(&mut *subject, &mut *reference, &tokens, tolerance)?;
    if as_json {
        println!(
            "{}",
            json!({"model": session.model_id, "encodings": session.file_type, "agrees": report.agrees(), "report": report})
        );
    } else {
        print(&session, &report);
    }
    Ok(if report.agrees() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whole blocks of text, the last one partly masked; at most what the context holds.
fn tokens(session: &Session, text: &str) -> anyhow::Result<Vec<u32>> {
    let mut tokens = session.encode_raw(text)?;
    tokens.truncate((session.context / BLOCK * BLOCK).saturating_sub(MASKED));
    let end = (tokens.len() + MASKED).next_multiple_of(BLOCK).min(session.context / BLOCK * BLOCK);
    tokens.resize(end, session.special.decoder_ids().mask);
    Ok(tokens)
}

fn print(session: &Session, report: &VerifyReport) {
    println!("{} ({}): {} against {}", session.model_id, session.file_type, report.subject, report.reference);
    println!("{} positions; relative RMS of the difference, largest absolute difference\n", report.positions);
    println!("{:<11} {:>22} {:>22} {:>16} {:>11}", "layer", "attention", "hidden", "same experts", "close calls");
    for (index, layer) in report.layers.iter().enumerate() {
        let pair = |difference: crate::model::verify::Difference| {
            format!("{:.1e}  {:.1e}", difference.relative_rms, difference.max_abs)
        };
        let (same, close) = match layer.routing {
            Some(routing) => (format!("{}/{}", routing.same, routing.choices), routing.close_calls.to_string()),
            None => ("dense".to_owned(), String::new()),
        };
        println!("{index:<11} {:>22} {:>22} {same:>16} {close:>11}", pair(layer.attention), pair(layer.hidden));
    }
    let logits = report.logits;
    println!(
        "\nlogits: relative RMS {:.1e}, largest difference {:.1e}, same best token at {} of {} positions",
        logits.relative_rms, logits.max_abs, report.top1_same, report.positions
    );
    for fault in &report.faults {
        println!("fault: {fault}");
    }
    println!("{}", if report.agrees() { "they agree" } else { "they do not agree" });
}
