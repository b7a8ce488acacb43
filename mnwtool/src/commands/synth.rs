//! `mnwtool synth`: a `.mnw` file with random weights, for tests and measurements without a download.

use std::path::{Path, PathBuf};

use minnow_kernels::codec::Quality;

use super::container::{Container, Pace, Resumption};
use super::destination;
use crate::failure::Failure;
use crate::plan::{self, Choice};
use crate::synthetic::{Preset, Synthetic};

/// What to make.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) output: PathBuf,
    pub(crate) preset: Preset,
    pub(crate) choice: Choice,
    pub(crate) seed: u64,
    pub(crate) layers: usize,
    pub(crate) workers: usize,
    pub(crate) force: bool,
    pub(crate) json: bool,
    pub(crate) progress: bool,
}

/// Makes the weights and writes them through the same pipeline as a conversion.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let folder = destination::check_file(&options.output, options.force)?;
    let name = format!("{}-synthetic", options.preset.name());
    let label = Path::new(&name);
    let source =
        Synthetic::new(options.preset, options.layers, options.seed).map_err(|error| Failure::at(label, error))?;
    let conversion = plan::convert(source.config(), source.specs(), options.choice, &[])
        .map_err(|error| Failure::at(label, error))?;
    let container = Container {
        output: &options.output,
        folder: &folder,
        model_id: name.clone(),
        assets: source.assets().clone(),
        tensors: conversion.tensors,
        warnings: conversion.warnings,
        source: &source,
        source_path: label,
        io: None,
        backend: "random",
        quality: Quality::Rtn,
        resumption: Resumption::Never,
    };
    container.write(Pace {
        workers: options.workers,
        progress: options.progress,
        force: options.force,
        sha256: false,
        json: options.json,
    })
}
