//! `--device reference`: the model written once, plainly, in candle-core on the CPU, in f32.
//!
//! The twin of every faster backend: read it beside the model description, section 3. All weights are widened to f32,
//! so it takes two to eight times the memory of the checkpoint.
//!
//! It evaluates one 32-token block of one sequence at a time, also in prefill. That is what makes its results exact
//! functions of a sequence's own tokens: a matrix product never sees rows of anything else, and always has the same
//! number of rows, so that the tensor library cannot choose another summation order. It is also why no mask appears:
//! a block sees all of itself and of the blocks before it, and nothing later has been computed yet.

use std::collections::BTreeMap;

use candle_core::{D, Device, Tensor};
use minnow_common::{BLOCK, ModelConfig, Routing};
use minnow_kernels::oracle;

use super::{
    Backend, Batch, ExpertActivations, Logits, ModelError, Need, Output, PageId, Point, Probe, Recorder, Segment,
    check_fp4_experts, check_page_size, read_values, write_values,
};
use crate::decoder::Candidates;
use crate::weights::{FeedForward, Gated, Layer, Stored, Weights};

/// The model in candle tensors, with its pages.
pub struct Reference {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<ReferenceLayer>,
    final_norm: Tensor,
    head: Tensor,
    rope: Rope,
    pages: Vec<Page>,
    /// Whether what enters the routed experts is quantized to four bits.
    has_fp4_experts: bool,
}

/// Weights of one layer; matrices are `[out, in]`.
struct ReferenceLayer {
    input_norm: Tensor,
    qkv: Tensor,
    /// Of query and key heads.
    head_norms: Option<(Tensor, Tensor)>,
    dense: Tensor,
    post_norm: Tensor,
    feed_forward: ReferenceFeedForward,
}

enum ReferenceFeedForward {
    Dense(ReferenceGated),
    Experts { router: Tensor, bias: Vec<f32>, routed: Vec<ReferenceGated>, shared: Option<ReferenceGated> },
}

struct ReferenceGated {
    gate: Tensor,
    up: Tensor,
    down: Tensor,
}

/// K and V of one block, `[kv_heads, 32, head_dim]` each, for each layer that has computed them.
type Page = Vec<Option<(Tensor, Tensor)>>;

/// What the block at hand needs to know besides its values.
struct BlockContext<'a> {
    segment: usize,
    /// Pages of the earlier blocks, then of this one.
    pages: &'a [PageId],
    /// Cosines and sines of its 32 positions, `[32, rotary_dim / 2]` each.
    cos: Tensor,
    sin: Tensor,
}

impl Reference {
    /// Widens `weights` and makes room for the K/V of `page_count` blocks, allocated as they are written.
    pub fn new(weights: &Weights, page_count: usize) -> Result<Self, ModelError> {
        let config = weights.config.clone();
        Ok(Self {
            embedding: matrix(&weights.embedding)?,
            layers: weights.layers.iter().map(ReferenceLayer::new).collect::<Result<_, _>>()?,
            final_norm: vector(&weights.final_norm)?,
            head: matrix(&weights.head)?,
            rope: Rope::new(config.rope_theta, config.rotary_dim),
            pages: (0..page_count).map(|_| vec![None; config.num_hidden_layers]).collect(),
            has_fp4_experts: false,
            config,
        })
    }

    /// The same with what enters the routed experts of `weights`, its own, quantized to four bits
    /// (`kernels::oracle::round_to_fp4`). Refused where they are not NVFP4.
    pub fn with_fp4_expert_activations(self, weights: &Weights) -> Result<Self, ModelError> {
        check_fp4_experts(weights)?;
        Ok(Self { has_fp4_experts: true, ..self })
    }

    fn expert_activations(&self) -> ExpertActivations {
        if self.has_fp4_experts { ExpertActivations::Fp4 } else { ExpertActivations::Plain }
    }

    /// Evaluates the blocks of one segment in order.
    fn segment(&mut self, index: usize, part: &Segment<'_>, probe: &mut Recorder<'_>) -> Result<Output, ModelError> {
        let mut logits = Vec::new();
        let earlier = part.pages.len() - part.blocks();
        for (block, tokens) in part.tokens.chunks_exact(BLOCK).enumerate() {
            let pages = &part.pages[..=earlier + block];
            let (cos, sin) = self.rope.tables((earlier + block) * BLOCK)?;
            let context = BlockContext { segment: index, pages, cos, sin };
            let x = self.block(tokens, &context, probe)?;
            if part.need != Need::Nothing {
                let x = rms_norm(&x, &self.final_norm, self.config.rms_norm_eps)?;
                record(probe, index, None, Point::Normalized, &x)?;
                let rows = linear(&x, &self.head)?;
                record(probe, index, None, Point::Logits, &rows)?;
                logits.extend(values(&rows)?);
            }
        }
        let logits = Logits::new(self.config.vocab_size, logits);
        Ok(match part.need {
            Need::Nothing => Output::Nothing,
            Need::Candidates => Output::Candidates(logits.rows().map(Candidates::from_logits).collect()),
            Need::Logits => Output::Logits(logits),
        })
    }

    /// The residual stream `[32, hidden]` after all layers. Writes the K/V of this block.
    fn block(
        &mut self,
        tokens: &[u32],
        context: &BlockContext<'_>,
        probe: &mut Recorder<'_>,
    ) -> Result<Tensor, ModelError> {
        let Self { config, embedding, layers, pages, has_fp4_experts, .. } = self;
        let mut x = embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        record(probe, context.segment, None, Point::Embeddings, &x)?;
        for (index, layer) in layers.iter().enumerate() {
            let h = rms_norm(&x, &layer.input_norm, config.rms_norm_eps)?;
            x = (x + layer.attention(&h, index, config, context, pages, probe)?)?;
            record(probe, context.segment, Some(index), Point::Attention, &x)?;
            let h = rms_norm(&x, &layer.post_norm, config.rms_norm_eps)?;
            x = (x + layer.feed_forward(&h, index, config, *has_fp4_experts, context, probe)?)?;
            record(probe, context.segment, Some(index), Point::Hidden, &x)?;
        }
        Ok(x)
    }
}

impl Backend for Reference {
    fn config(&self) -> &ModelConfig {
        &self.config
    }

    fn page_count(&self) -> usize {
        self.pages.len()
    }

    fn describe(&self) -> String {
        format!("reference (candle, f32{})", self.expert_activations().suffix())
    }

    fn arithmetic(&self) -> String {
        self.describe()
    }

    fn page_bytes(&self) -> usize {
        super::page_bytes(&self.config)
    }

    /// Layer by layer, keys before values, `[kv_heads, 32, head_dim]` each.
    fn export_page(&self, page: PageId, out: &mut [u8]) -> Result<(), ModelError> {
        check_page_size(&self.config, out.len())?;
        let empty = || ModelError::PageEmpty { page: page.0, count: self.pages.len() };
        let layers = self.pages.get(page.0 as usize).ok_or_else(empty)?;
        let share = out.len() / layers.len() / 2;
        for (layer, bytes) in layers.iter().zip(out.chunks_exact_mut(2 * share)) {
            let (k, v) = layer.as_ref().ok_or_else(empty)?;
            for (tensor, bytes) in [k, v].into_iter().zip(bytes.chunks_exact_mut(share)) {
                write_values(bytes, &values(tensor)?);
            }
        }
        Ok(())
    }

    fn import_page(&mut self, page: PageId, bytes: &[u8]) -> Result<(), ModelError> {
        check_page_size(&self.config, bytes.len())?;
        let count = self.pages.len();
        let layers = self.pages.get_mut(page.0 as usize).ok_or(ModelError::PageEmpty { page: page.0, count })?;
        let shape = (self.config.num_key_value_heads, BLOCK, self.config.head_dim);
        let share = bytes.len() / layers.len() / 2;
        for (layer, bytes) in layers.iter_mut().zip(bytes.chunks_exact(2 * share)) {
            let (keys, values) = bytes.split_at(share);
            let tensor = |bytes| Tensor::from_iter(read_values(bytes), &Device::Cpu)?.reshape(shape);
            *layer = Some((tensor(keys)?, tensor(values)?));
        }
        Ok(())
    }

    fn forward(&mut self, batch: &Batch<'_>, probe: Option<&mut dyn Probe>) -> Result<Vec<Output>, ModelError> {
        batch.check(&self.config, self.pages.len())?;
        let mut probe = Recorder(probe);
        let segments = batch.segments.iter().enumerate();
        segments.map(|(index, segment)| self.segment(index, segment, &mut probe)).collect()
    }
}

impl ReferenceLayer {
    fn new(layer: &Layer) -> Result<Self, ModelError> {
        Ok(Self {
            input_norm: vector(&layer.input_norm)?,
            qkv: matrix(&layer.qkv)?,
            head_norms: match &layer.head_norms {
                None => None,
                Some(norms) => Some((vector(&norms.query)?, vector(&norms.key)?)),
            },
            dense: matrix(&layer.dense)?,
            post_norm: vector(&layer.post_norm)?,
            feed_forward: match &layer.feed_forward {
                FeedForward::Dense(gated) => ReferenceFeedForward::Dense(ReferenceGated::new(gated)?),
                FeedForward::Experts(experts) => ReferenceFeedForward::Experts {
                    router: matrix(&experts.router)?,
                    bias: experts.bias.clone(),
                    routed: experts.routed.iter().map(ReferenceGated::new).collect::<Result<_, _>>()?,
                    shared: experts.shared.as_ref().map(ReferenceGated::new).transpose()?,
                },
            },
        })
    }

    /// Attention of the block over itself and all earlier blocks, projected: `h: [32, hidden]` to `[32, hidden]`.
    fn attention(
        &self,
        h: &Tensor,
        index: usize,
        config: &ModelConfig,
        context: &BlockContext<'_>,
        pages: &mut [Page],
        probe: &mut Recorder<'_>,
    ) -> Result<Tensor, ModelError> {
        let (heads, kv_heads, width) = (config.num_attention_heads, config.num_key_value_heads, config.head_dim);
        // [32, heads + 2 * kv_heads, head_dim] -> [heads + 2 * kv_heads, 32, head_dim]
        let qkv = linear(h, &self.qkv)?.reshape((BLOCK, heads + 2 * kv_heads, width))?.transpose(0, 1)?.contiguous()?;
        let mut q = qkv.narrow(0, 0, heads)?;
        let mut k = qkv.narrow(0, heads, kv_heads)?;
        let v = qkv.narrow(0, heads + kv_heads, kv_heads)?.contiguous()?;
        if let Some((query_norm, key_norm)) = &self.head_norms {
            q = rms_norm(&q, query_norm, config.rms_norm_eps)?;
            k = rms_norm(&k, key_norm, config.rms_norm_eps)?;
        }
        let q = rotate(&q, &context.cos, &context.sin)?;
        let k = rotate(&k, &context.cos, &context.sin)?;
        record(probe, context.segment, Some(index), Point::Key, &by_position(&k)?)?;
        record(probe, context.segment, Some(index), Point::Value, &by_position(&v)?)?;
        if let Some((own, _)) = context.pages.split_last() {
            pages[own.0 as usize][index] = Some((k, v));
        }

        let seen = context.pages.iter().filter_map(|page| pages[page.0 as usize][index].as_ref());
        let (k, v): (Vec<_>, Vec<_>) = seen.map(|(k, v)| (k, v)).unzip();
        let (k, v) = (Tensor::cat(&k, 1)?, Tensor::cat(&v, 1)?);
        // Query head j uses key-value head j / (heads / kv_heads), so each of those serves consecutive query heads.
        let q = q.reshape((kv_heads, heads / kv_heads * BLOCK, width))?;
        let scores = (q.matmul(&k.transpose(1, 2)?)? * f64::from((width as f32).sqrt().recip()))?;
        let mixed = softmax(&scores)?.matmul(&v)?.reshape((heads, BLOCK, width))?;
        linear(&by_position(&mixed)?, &self.dense)
    }

    /// The feed-forward part: `h: [32, hidden]` to `[32, hidden]`.
    fn feed_forward(
        &self,
        h: &Tensor,
        index: usize,
        config: &ModelConfig,
        has_fp4_experts: bool,
        context: &BlockContext<'_>,
        probe: &mut Recorder<'_>,
    ) -> Result<Tensor, ModelError> {
        let (router, bias, routed, shared) = match &self.feed_forward {
            ReferenceFeedForward::Dense(gated) => return gated.apply(h),
            ReferenceFeedForward::Experts { router, bias, routed, shared } => (router, bias, routed, shared),
        };
        let logits = values(&linear(h, router)?)?;
        let routes = Routes::choose(&logits, bias, config);
        if probe.is_active() {
            let mut record = |point, values: &[f32]| {
                probe.record(context.segment, Some(index), point, values.len() / BLOCK, values);
            };
            record(Point::RouterLogits, &logits);
            record(Point::RouterScores, &routes.biased);
            record(Point::RouterIds, &routes.ids.iter().map(|&id| id as f32).collect::<Vec<_>>());
            record(Point::RouterWeights, &routes.weights);
        }
        let mut sum = h.zeros_like()?;
        for (expert, (rows, weights)) in routes.by_expert() {
            let rows = Tensor::new(rows, &Device::Cpu)?;
            let weights = Tensor::new(weights, &Device::Cpu)?.unsqueeze(1)?;
            let (expert, h) = (&routed[expert], h.index_select(&rows, 0)?);
            let out = if has_fp4_experts { expert.apply_fp4(&h)? } else { expert.apply(&h)? };
            let out = out.broadcast_mul(&weights)?;
            sum = sum.index_add(&rows, &out, 0)?;
        }
        match shared {
            None => Ok(sum),
            Some(shared) => Ok((sum + shared.apply(h)?)?),
        }
    }
}

impl ReferenceGated {
    fn new(gated: &Gated) -> Result<Self, ModelError> {
        Ok(Self { gate: matrix(&gated.gate)?, up: matrix(&gated.up)?, down: matrix(&gated.down)? })
    }

    fn apply(&self, h: &Tensor) -> Result<Tensor, ModelError> {
        linear(&self.gated(h)?, &self.down)
    }

    /// The same of what four bits leave of the rows that enter each projection.
    fn apply_fp4(&self, h: &Tensor) -> Result<Tensor, ModelError> {
        linear(&rounded_to_fp4(&self.gated(&rounded_to_fp4(h)?)?)?, &self.down)
    }

    fn gated(&self, h: &Tensor) -> Result<Tensor, ModelError> {
        Ok((linear(h, &self.gate)?.silu()? * linear(h, &self.up)?)?)
    }
}

fn rounded_to_fp4(rows: &Tensor) -> Result<Tensor, ModelError> {
    let mut rounded = values(rows)?;
    oracle::round_to_fp4(&mut rounded, rows.dim(1)?);
    Ok(Tensor::from_vec(rounded, rows.shape(), &Device::Cpu)?)
}

/// Which experts each position of a block uses, and how much.
struct Routes {
    /// Scores with the selection bias, `[32, experts]`.
    biased: Vec<f32>,
    /// `[32, experts per token]`, best first.
    ids: Vec<usize>,
    /// In the order of `ids`.
    weights: Vec<f32>,
}

impl Routes {
    /// Chooses by `logits: [32, experts]` and `bias: [experts]`; sections 3.1 to 3.3 of the model description.
    fn choose(logits: &[f32], bias: &[f32], config: &ModelConfig) -> Self {
        let (experts, per_token) = (bias.len(), config.num_experts_per_tok);
        let scores: Vec<f32> = logits.iter().map(|&logit| 1.0 / (1.0 + (-logit).exp())).collect();
        let biased: Vec<f32> = scores.chunks_exact(experts).flat_map(|row| add(row, bias)).collect();
        let pool = match config.routing {
            Routing::Block { capacity } => {
                let peaks = (0..experts).map(|expert| {
                    biased.iter().skip(expert).step_by(experts).copied().fold(f32::NEG_INFINITY, f32::max)
                });
                best(&peaks.collect::<Vec<_>>(), capacity)
            }
            Routing::Groups { .. } => Vec::new(),
        };
        let mut routes = Self { biased: Vec::new(), ids: Vec::new(), weights: Vec::new() };
        for (row, scores) in biased.chunks_exact(experts).zip(scores.chunks_exact(experts)) {
            let allowed = match config.routing {
                Routing::Block { .. } => pool.clone(),
                Routing::Groups { groups, kept } => members_of_best_groups(row, groups, kept),
            };
            let mut open = vec![f32::NEG_INFINITY; experts];
            allowed.iter().for_each(|&expert| open[expert] = row[expert]);
            let ids = best(&open, per_token);
            let chosen: Vec<f32> = ids.iter().map(|&id| scores[id]).collect();
            let sum = chosen.iter().sum::<f32>() + 1e-20;
            let share = |score: f32| if per_token == 1 { score } else { score / sum };
            routes.weights.extend(chosen.iter().map(|&score| share(score) * config.routed_scaling_factor));
            routes.ids.extend(ids);
        }
        routes.biased = biased;
        routes
    }

    /// The rows that use each expert, with its weight in them; experts in ascending order.
    fn by_expert(&self) -> BTreeMap<usize, (Vec<u32>, Vec<f32>)> {
        let per_token = self.ids.len() / BLOCK;
        let mut users: BTreeMap<usize, (Vec<u32>, Vec<f32>)> = BTreeMap::new();
        for (slot, (&expert, &weight)) in self.ids.iter().zip(&self.weights).enumerate() {
            let (rows, weights) = users.entry(expert).or_default();
            rows.push((slot / per_token) as u32);
            weights.push(weight);
        }
        users
    }
}

fn add<'a>(row: &'a [f32], bias: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
    row.iter().zip(bias).map(|(score, bias)| score + bias)
}

/// Indices of the `count` largest values, largest first, equal ones by lower index.
fn best(values: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // Stable, so equal values keep the order of their indices; adding zero makes the two zeros equal.
    order.sort_by(|&a, &b| (values[b] + 0.0).total_cmp(&(values[a] + 0.0)));
    order.truncate(count);
    order
}

/// Experts of the `kept` best of `groups` equal groups; a group counts by the sum of its two largest scores.
fn members_of_best_groups(row: &[f32], groups: usize, kept: usize) -> Vec<usize> {
    let size = row.len() / groups;
    let strength = row.chunks_exact(size).map(|group| best(group, 2).iter().map(|&index| group[index]).sum());
    let kept = best(&strength.collect::<Vec<f32>>(), kept);
    kept.into_iter().flat_map(|group| group * size..(group + 1) * size).collect()
}

/// Rotary frequencies; section 3 of the model description.
struct Rope {
    /// `[rotary_dim / 2]`: `theta^(2i / rotary_dim)` rounded to f32, then an f32 reciprocal.
    frequencies: Vec<f32>,
}

impl Rope {
    fn new(theta: f64, rotary_dim: usize) -> Self {
        let exponents = (0..rotary_dim / 2).map(|index| (2 * index) as f64 / rotary_dim as f64);
        Self { frequencies: exponents.map(|exponent| 1.0 / theta.powf(exponent) as f32).collect() }
    }

    /// Cosines and sines of 32 positions from `first` on. The angle is an f32 product: its rounding is part of the
    /// model, which shows at long positions.
    fn tables(&self, first: usize) -> Result<(Tensor, Tensor), ModelError> {
        let angles = (first..first + BLOCK)
            .flat_map(|position| self.frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency)));
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        let table = |values| Tensor::from_vec(values, (BLOCK, self.frequencies.len()), &Device::Cpu);
        Ok((table(cos)?, table(sin)?))
    }
}

/// Rotates the leading dimensions of `x: [heads, 32, head_dim]`: dimension `i` is paired with `i + rotary_dim / 2`.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor, ModelError> {
    let half = cos.dim(1)?;
    let (a, b) = (x.narrow(2, 0, half)?, x.narrow(2, half, half)?);
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
    let rest = x.dim(2)? - 2 * half;
    if rest == 0 {
        return Ok(Tensor::cat(&[first, second], 2)?);
    }
    Ok(Tensor::cat(&[first, second, x.narrow(2, 2 * half, rest)?], 2)?)
}

/// `weight * x / sqrt(mean(x^2) + eps)` over the last dimension.
fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor, ModelError> {
    let root = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(eps))?.sqrt()?;
    Ok(x.broadcast_div(&root)?.broadcast_mul(weight)?)
}

/// `x: [rows, in]` times the transpose of `weight: [out, in]`.
fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor, ModelError> {
    Ok(x.matmul(&weight.t()?)?)
}

/// Over the last dimension.
fn softmax(scores: &Tensor) -> Result<Tensor, ModelError> {
    let shifted = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    Ok(shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)?)
}

/// `[heads, 32, head_dim]` to `[32, heads * head_dim]`.
fn by_position(x: &Tensor) -> Result<Tensor, ModelError> {
    Ok(x.transpose(0, 1)?.contiguous()?.reshape((BLOCK, ()))?)
}

fn record(
    probe: &mut Recorder<'_>,
    segment: usize,
    layer: Option<usize>,
    point: Point,
    rows: &Tensor,
) -> Result<(), ModelError> {
    if probe.is_active() {
        probe.record(segment, layer, point, rows.dim(1)?, &values(rows)?);
    }
    Ok(())
}

fn values(tensor: &Tensor) -> Result<Vec<f32>, ModelError> {
    Ok(tensor.flatten_all()?.to_vec1()?)
}

fn vector(values: &[f32]) -> Result<Tensor, ModelError> {
    Ok(Tensor::new(values, &Device::Cpu)?)
}

fn matrix(stored: &Stored) -> Result<Tensor, ModelError> {
    let view = stored.view();
    Ok(Tensor::from_vec(stored.decoded(), (view.rows(), view.cols()), &Device::Cpu)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_scores_choose_the_lower_index() {
        assert_eq!(best(&[1.0, 3.0, 3.0, 2.0, 3.0], 4), [1, 2, 4, 3]);
        assert_eq!(best(&[0.0; 4], 2), [0, 1]);
        assert_eq!(members_of_best_groups(&[1.0, 1.0, 0.0, 2.0, 2.0, 0.0], 3, 2), [0, 1, 2, 3]);
    }
}
