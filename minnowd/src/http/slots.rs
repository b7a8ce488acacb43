//! Which requests run, as `/slots` shows it. Never their text.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

/// One running request.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    /// Number of the request, counted from 0.
    pub number: u64,
    /// Effective generation settings.
    pub settings: Value,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Output limit.
    pub max_new: usize,
    /// Committed output tokens so far.
    pub decoded: usize,
    /// Whether the output has a line break so far.
    pub has_line_break: bool,
}

/// All slots. The lowest free one is taken first.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    tasks: Vec<Option<Task>>,
    begun: u64,
}

/// A slot in use; free again on drop.
#[derive(Debug)]
pub(crate) struct Slot {
    slots: Slots,
    index: usize,
}

impl Slots {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a request that begins to run.
    pub(crate) fn take(&self, settings: Value, prompt_tokens: usize, max_new: usize) -> Slot {
        let mut state = self.lock();
        let task = Task { number: state.begun, settings, prompt_tokens, max_new, decoded: 0, has_line_break: false };
        state.begun += 1;
        let index = state.tasks.iter().position(Option::is_none).unwrap_or(state.tasks.len());
        if index == state.tasks.len() {
            state.tasks.push(None);
        }
        state.tasks[index] = Some(task);
        drop(state);
        Slot { slots: self.clone(), index }
    }

    /// `count` slots, of which at least `active` are shown as busy: the engine may still be in the last forward of a
    /// request whose client is gone.
    pub(crate) fn describe(&self, count: usize, active: usize, context: usize) -> Vec<Value> {
        let state = self.lock();
        let mut unaccounted = active.saturating_sub(state.tasks.iter().flatten().count());
        let slots = (0..count).map(|index| {
            let mut slot = json!({
                "id": index, "id_task": -1, "n_ctx": context, "speculative": false, "is_processing": false,
            });
            if let Some(task) = state.tasks.get(index).and_then(Option::as_ref) {
                slot["id_task"] = json!(task.number);
                slot["is_processing"] = json!(true);
                slot["n_prompt_tokens"] = json!(task.prompt_tokens);
                slot["params"] = task.settings.clone();
                slot["next_token"] = json!({
                    "has_next_token": task.decoded < task.max_new,
                    "has_new_line": task.has_line_break,
                    "n_remain": task.max_new.saturating_sub(task.decoded),
                    "n_decoded": task.decoded,
                });
            } else if unaccounted > 0 {
                unaccounted -= 1;
                slot["is_processing"] = json!(true);
            }
            slot
        });
        slots.collect()
    }
}

impl Slot {
    /// Notes progress.
    pub(crate) fn update(&self, decoded: usize, has_line_break: bool) {
        if let Some(Some(task)) = self.slots.lock().tasks.get_mut(self.index) {
            task.decoded = decoded;
            task.has_line_break |= has_line_break;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(task) = self.slots.lock().tasks.get_mut(self.index) {
            *task = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_busy_until_it_is_dropped() {
        let slots = Slots::default();
        let busy = |active| {
            let all = slots.describe(3, active, 64);
            all.iter().map(|slot| slot["is_processing"] == true).collect::<Vec<_>>()
        };
        let first = slots.take(json!({}), 5, 10);
        let second = slots.take(json!({}), 5, 10);
        assert_eq!(busy(2), [true, true, false]);
        drop(first);
        assert_eq!(busy(1), [false, true, false]);
        assert_eq!(busy(2), [true, true, false], "the engine still runs what the client left");
        second.update(4, true);
        let shown = slots.describe(3, 1, 64);
        assert_eq!(
            shown[1]["next_token"],
            json!({"has_next_token": true, "has_new_line": true, "n_remain": 6, "n_decoded": 4})
        );
        assert_eq!(shown[0]["id_task"], -1);
    }
}
