//! A job whose whole text must have a form: its output is held, checked, and made again with the next seed if it fails.
//!
//! Without a form this is the job itself. With one, blocks come out empty and the checked text comes with `Finished`, so
//! nothing wrong is ever shown. The form holds only for finished text: what the limit cut, and answers that call tools,
//! come out as they are.

use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tracing::error;

use super::App;
use super::answer::OUTPUT_SHOWN_MAX;
use super::error::{ApiError, Code};
use super::openai::{Format, Order};
use super::running::Running;
use crate::engine::{Event, Finish, FinishReason};
use crate::text::Delta;

/// A job, and the same one again while its output is wrong.
pub(crate) struct Attempts {
    running: Running,
    form: Option<Form>,
    /// The check of a finished text, on a thread that may take its time.
    checking: Option<JoinHandle<(Finish, Result<(), ApiError>)>>,
    /// The next job, on its way through the queue.
    starting: Option<BoxFuture<'static, Result<Running, ApiError>>>,
    /// The seed of the job that runs.
    seed: u64,
}

/// What is needed to check and to try again.
struct Form {
    app: App,
    format: Format,
    order: Order,
    retries_left: usize,
    held: Vec<Delta>,
}

impl Attempts {
    /// Submits a job and waits until it leaves the queue.
    pub(crate) async fn start(app: &App, order: Order, format: Option<Format>) -> Result<Self, ApiError> {
        let form = format.map(|format| Form {
            app: app.clone(),
            format,
            // The same seed gives the same text, and so does any seed without sampling.
            retries_left: if order.task.options.temperature > 0.0 { app.options().format_retries } else { 0 },
            order: order.clone(),
            held: Vec::new(),
        });
        let seed = order.task.seed;
        Ok(Self { running: Running::start(app, order).await?, form, checking: None, starting: None, seed })
    }

    /// Prompt tokens that the first job found in the cache.
    pub(crate) fn cached_tokens(&self) -> usize {
        self.running.cached_tokens
    }

    /// The seed of the job that runs.
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    /// The next event. Waiting for it may be given up and begun again.
    pub(crate) async fn next(&mut self) -> Result<Event, ApiError> {
        loop {
            if let Some(starting) = &mut self.starting {
                self.running = starting.await?;
                self.starting = None;
            }
            if let Some(checking) = &mut self.checking {
                let checked = checking.await;
                self.checking = None;
                let (finish, outcome) = checked.map_err(|failure| {
                    error!(%failure, "checking an output panicked");
                    ApiError::internal()
                })?;
                match outcome {
                    Ok(()) => return Ok(Event::Finished(finish)),
                    Err(refused) => self.try_again(refused)?,
                }
                continue;
            }
            let mut event = self.running.next().await;
            let Some(form) = &mut self.form else { return Ok(event) };
            match &mut event {
                Event::Block { deltas, text_tokens, .. } => {
                    form.held.append(deltas);
                    // Clients count what they were shown, and that never goes down.
                    *text_tokens = 0;
                }
                Event::Finished(_) => {
                    let Event::Finished(mut finish) = event else { continue };
                    let (format, held) = (form.format.clone(), std::mem::take(&mut form.held));
                    // A schema decides how long this takes.
                    self.checking = Some(tokio::task::spawn_blocking(move || {
                        let outcome = settle(&format, held, &mut finish);
                        (finish, outcome)
                    }));
                    continue;
                }
                _ => {}
            }
            return Ok(event);
        }
    }

    /// Begins the next job in place of one whose output was refused, or gives the refusal back.
    fn try_again(&mut self, refused: ApiError) -> Result<(), ApiError> {
        let Some(form) = self.form.as_mut().filter(|form| form.retries_left > 0) else { return Err(refused) };
        form.retries_left -= 1;
        form.order.task.seed = form.order.task.seed.wrapping_add(1);
        self.seed = form.order.task.seed;
        let (app, order) = (form.app.clone(), form.order.clone());
        self.starting = Some(Box::pin(async move { Running::start(&app, order).await }));
        Ok(())
    }
}

/// Puts everything that was held into `finish`, checked.
fn settle(format: &Format, held: Vec<Delta>, finish: &mut Finish) -> Result<(), ApiError> {
    let mut deltas = held;
    deltas.append(&mut finish.deltas);
    let text: Option<String> =
        deltas.iter().map(|delta| if let Delta::Content(text) = delta { Some(text.as_str()) } else { None }).collect();
    finish.deltas = match text {
        Some(text) if finish.reason == FinishReason::Stop => match format.check(&text) {
            Ok(json) => vec![Delta::Content(json.to_owned())],
            Err(reason) => {
                let message = format!("the model's output does not have the form that was asked for: {reason}");
                let shown: String = text.chars().take(OUTPUT_SHOWN_MAX / 4).collect();
                let error = ApiError::new(Code::JsonValidationFailed, message).at("response_format");
                return Err(error.with("output", shown));
            }
        },
        _ => deltas,
    };
    Ok(())
}
