//! A backend that computes nothing: at every position it is sure of the token that a script has there. For tests of what
//! lies around a model, and of what that costs.

use minnow_common::ModelConfig;
use minnow_tests::checkpoint;
use minnowd::cache::PageId;
use minnowd::decoder::{Candidate, Candidates};
use minnowd::model::{Backend, Batch, ModelError, Need, Output, Probe};

/// The token at an absolute position.
pub type Script = fn(usize) -> u32;

/// See the file.
pub struct Scripted {
    config: ModelConfig,
    pages: usize,
    script: Script,
}

impl Scripted {
    pub fn new(pages: usize, script: Script) -> Self {
        let mut config = checkpoint::config("t16");
        config["max_position_embeddings"] = 8192.into();
        let config = ModelConfig::from_json(&config.to_string()).expect("a configuration");
        Self { config, pages, script }
    }
}

impl Backend for Scripted {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn page_count(&self) -> usize {
        self.pages
    }

    fn describe(&self) -> String {
        "a script".to_owned()
    }

    fn arithmetic(&self) -> String {
        "none".to_owned()
    }

    fn page_bytes(&self) -> usize {
        4
    }

    fn export_page(&self, _: PageId, _: &mut [u8]) -> Result<(), ModelError> {
        Ok(())
    }

    fn import_page(&mut self, _: PageId, _: &[u8]) -> Result<(), ModelError> {
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>, _: Option<&mut dyn Probe>) -> Result<Vec<Output>, ModelError> {
        batch.check(&self.config, self.pages)?;
        let output = |segment: &minnowd::model::Segment<'_>| {
            let start = segment.pages.len() * 32 - segment.tokens.len();
            let certain = |position: usize| {
                let best = Candidate { token: (self.script)(start + position), confidence: 0.99 };
                Candidates([best, Candidate::default(), Candidate::default(), Candidate::default()])
            };
            match segment.need {
                Need::Nothing => Output::Nothing,
                Need::Candidates => Output::Candidates((0..segment.tokens.len()).map(certain).collect()),
                Need::Logits => panic!("a script has no logits"),
            }
        };
        Ok(batch.segments.iter().map(output).collect())
    }
}
