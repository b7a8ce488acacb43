//! `minnowd bench serve` as its users see it: the real program on the embedded demo model.

use minnow_tests::program::{minnowd, stderr, stdout};
use serde_json::Value;

/// The report as JSON; windows are as long as this machine needs until every row is `enough`.
fn measured(options: &[&str], enough: fn(&Value) -> bool) -> Value {
    for seconds in ["0.5", "2", "8", "30"] {
        let short = ["bench", "serve", "--seconds", seconds, "--warm-up", "0.2", "--max-tokens", "40", "--json"];
        let output = minnowd(&[&short, options].concat());
        assert!(output.status.success(), "{}", stderr(&output));
        let report: Value = serde_json::from_str(&stdout(&output)).expect("one JSON object");
        if report["rows"].as_array().expect("rows").iter().all(enough) {
            return report;
        }
    }
    panic!("no window was long enough");
}

#[test]
fn every_row_has_rates_waits_and_hits_through_the_engine_and_over_http() {
    for way in ["engine", "http"] {
        let report = measured(&["--streams", "1,3", "--windows", "2", "--over", way], |row| {
            row["text_tokens_per_second"]["median"].as_f64() > Some(0.0) && !row["between_blocks"].is_null()
        });
        assert_eq!(report["over"], way);
        let rows = report["rows"].as_array().expect("rows");
        assert_eq!(rows.iter().map(|row| row["streams"].as_u64()).collect::<Vec<_>>(), [Some(1), Some(3)]);
        for row in rows {
            let number = |pointer: &str| row.pointer(pointer).and_then(Value::as_f64).expect(pointer);
            for pointer in ["/text_tokens_per_second/median", "/forwards_per_second/p95", "/tokens_per_forward"] {
                assert!(number(pointer) > 0.0, "{pointer}: {row}");
            }
            for waits in ["/to_first_block", "/between_blocks"] {
                let ascending = ["p50_ms", "p95_ms", "p99_ms"].map(|name| number(&format!("{waits}/{name}")));
                assert!(ascending[0] > 0.0 && ascending.is_sorted(), "{waits}: {row}");
            }
            assert_eq!((number("/refused"), number("/failed")), (0.0, 0.0));
            assert!((0.0..=1.0).contains(&number("/cache_hit_share")));
        }
        assert!(rows[1]["sequences_per_forward"].as_f64().expect("a number") > 1.5, "three streams share forwards");
        assert!(rows[0]["cache_hit_share"].as_f64().expect("a number") > 0.0, "questions have a beginning in common");
    }
}

#[test]
fn an_open_loop_counts_from_arrivals_and_a_long_prompt_is_told_apart() {
    let report = measured(&["--streams", "2", "--windows", "3", "--rate", "1", "--long-prompt", "600"], |row| {
        row["requests"].as_u64() > Some(0) && row["beside_long_prompts"]["long_prompts"].as_u64() > Some(0)
    });
    assert_eq!(report["rate"], 1.0);
    assert_eq!(report["rows"][0]["failed"], 0);
}

#[test]
fn an_open_loop_over_several_numbers_of_streams_is_wrong_usage() {
    let output = minnowd(&["bench", "serve", "--rate", "5", "--streams", "1,2"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("--rate needs one number of --streams"));
}
