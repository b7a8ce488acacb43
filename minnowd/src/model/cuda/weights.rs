//! A checkpoint's tensors in device memory: each matrix once, in the order the kernels read it.
//!
//! [`Layout`] says where everything goes and how much it takes before a byte is read; [`super::load`] brings it there.

use half::bf16;
use minnow_common::inventory::{EMBEDDING, FINAL_NORM, HEAD, PROJECTIONS, layer};
use minnow_common::{Encoding, FloatType, ModelConfig, TensorSpec};
use minnow_formats::checkpoint::{Checkpoint, ReadError};
use minnow_kernels::cuda::{Buffer, CudaError, Device, Format, Pointer, Strips};
use thiserror::Error;

use super::load::load;

/// Matrices start at a multiple of this, which suits every kind of load.
const ALIGNMENT: usize = 256;

/// Why weights cannot be used on this device.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A tensor cannot be read, or does not match its digest.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The GPU refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A tensor is stored in a way the kernels do not compute with.
    #[error("tensor {name} is stored as {encoding}, which the CUDA backend does not compute with")]
    Encoding {
        /// Its name.
        name: String,
        /// Its encoding.
        encoding: String,
    },
}

/// Where a tensor goes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Target {
    /// Rows as they are, from this byte of the matrices on.
    Rows(usize),
    /// Strips from this byte of the matrices on, a pair as one matrix; the global scales, if there are any, from that
    /// place of the scales on.
    Strips { offset: usize, scale: usize, format: Format },
    /// BF16 from this element of the vectors on.
    Vector(usize),
    /// f32 from this element of the biases on.
    Bias(usize),
}

/// A matrix, or the matrices of all experts, among the matrices.
#[derive(Clone, Copy, Debug)]
struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    offset: usize,
    scales: usize,
}

/// A gated unit, or those of all experts.
#[derive(Clone, Copy, Debug)]
struct GatedMatrices {
    gate_up: Matrix,
    down: Matrix,
}

#[derive(Clone, Copy, Debug)]
enum FeedForwardLayout {
    Dense(GatedMatrices),
    Experts { router: Matrix, bias: usize, routed: GatedMatrices, shared: Option<GatedMatrices> },
}

#[derive(Clone, Copy, Debug)]
struct LayerLayout {
    input_norm: usize,
    qkv: Matrix,
    head_norms: Option<[usize; 2]>,
    dense: Matrix,
    post_norm: usize,
    feed_forward: FeedForwardLayout,
}

/// What is loaded in one go: one tensor, or gate and up of a gated unit, which become one matrix.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) name: String,
    pub(super) up: Option<String>,
    pub(super) target: Target,
}

/// Where every tensor of a checkpoint goes.
pub(super) struct Layout {
    items: Vec<Item>,
    layers: Vec<LayerLayout>,
    embedding: usize,
    final_norm: usize,
    head: Matrix,
    matrix_bytes: usize,
    vector_len: usize,
    bias_len: usize,
    scale_len: usize,
}

/// A gated unit on the device, or those of all experts.
pub(super) struct Gated {
    pub(super) gate_up: Strips,
    pub(super) down: Strips,
}

/// The part of a layer after attention.
pub(super) enum FeedForward {
    Dense(Gated),
    Experts { router: Strips, bias: Pointer<f32>, host_bias: Vec<f32>, routed: Gated, shared: Option<Gated> },
}

/// A layer on the device.
pub(super) struct Layer {
    pub(super) input_norm: Pointer<bf16>,
    pub(super) qkv: Strips,
    /// Null without norms of heads.
    pub(super) query_norm: Pointer<bf16>,
    pub(super) key_norm: Pointer<bf16>,
    pub(super) dense: Strips,
    pub(super) post_norm: Pointer<bf16>,
    pub(super) feed_forward: FeedForward,
}

/// A model on the device. Everything points into the four buffers, which live as long as this does.
pub(super) struct DeviceWeights {
    pub(super) layers: Vec<Layer>,
    pub(super) embedding: Pointer<bf16>,
    pub(super) final_norm: Pointer<bf16>,
    pub(super) head: Strips,
    _matrices: Buffer<u8>,
    _vectors: Buffer<bf16>,
    _biases: Buffer<f32>,
    _scales: Buffer<f32>,
}

impl Layout {
    /// Lays out the tensors of a checkpoint that has been checked to be a whole model. `multiplies_fp4`: whether products of
    /// NVFP4 matrices are those of four-bit numbers.
    pub(super) fn new(checkpoint: &Checkpoint, multiplies_fp4: bool) -> Result<Self, LoadError> {
        let config = checkpoint.config();
        let mut planner = Planner {
            checkpoint,
            multiplies_fp4,
            items: Vec::new(),
            matrix_bytes: 0,
            vector_len: 0,
            bias_len: 0,
            scale_len: 0,
        };
        let embedding = planner.rows(EMBEDDING)?;
        let layers = (0..config.num_hidden_layers).map(|index| planner.layer(index)).collect::<Result<_, _>>()?;
        let final_norm = planner.vector(FINAL_NORM)?;
        let head = planner.matrix(HEAD)?;
        let Planner { items, matrix_bytes, vector_len, bias_len, scale_len, .. } = planner;
        Ok(Self { items, layers, embedding, final_norm, head, matrix_bytes, vector_len, bias_len, scale_len })
    }

    /// Bytes of device memory that the weights take for good.
    pub(super) fn bytes(&self) -> u64 {
        (self.matrix_bytes + 2 * self.vector_len + 4 * (self.bias_len + self.scale_len)) as u64
    }

    /// Formats of the experts' matrices.
    pub(super) fn expert_formats(&self) -> Vec<Format> {
        let of_layer = |layer: &LayerLayout| match &layer.feed_forward {
            FeedForwardLayout::Experts { routed, .. } => vec![routed.gate_up.format, routed.down.format],
            FeedForwardLayout::Dense(_) => Vec::new(),
        };
        let mut formats: Vec<Format> = Vec::new();
        for format in self.layers.iter().flat_map(of_layer) {
            if !formats.contains(&format) {
                formats.push(format);
            }
        }
        formats
    }
}

/// Hands out places.
struct Planner<'a> {
    checkpoint: &'a Checkpoint,
    multiplies_fp4: bool,
    items: Vec<Item>,
    matrix_bytes: usize,
    vector_len: usize,
    bias_len: usize,
    scale_len: usize,
}

impl Planner<'_> {
    fn layer(&mut self, index: usize) -> Result<LayerLayout, LoadError> {
        let config = self.checkpoint.config();
        let named = |rest: &str| layer(index, rest);
        Ok(LayerLayout {
            input_norm: self.vector(&named("input_layernorm.weight"))?,
            qkv: self.matrix(&named("attention.query_key_value.weight"))?,
            head_norms: match config.use_qk_norm {
                false => None,
                true => Some([
                    self.vector(&named("attention.query_layernorm.weight"))?,
                    self.vector(&named("attention.key_layernorm.weight"))?,
                ]),
            },
            dense: self.matrix(&named("attention.dense.weight"))?,
            post_norm: self.vector(&named("post_attention_layernorm.weight"))?,
            feed_forward: match config.is_dense(index) {
                true => FeedForwardLayout::Dense(self.gated(&[named("mlp")])?),
                false => {
                    let expert = |expert| named(&format!("mlp.experts.{expert}"));
                    let experts: Vec<String> = (0..config.num_experts).map(expert).collect();
                    FeedForwardLayout::Experts {
                        router: self.matrix(&named("mlp.gate.weight"))?,
                        bias: self.bias(named("mlp.gate.expert_bias")),
                        routed: self.gated(&experts)?,
                        shared: match config.num_shared_experts {
                            0 => None,
                            _ => Some(self.gated(&[named("mlp.shared_experts")])?),
                        },
                    }
                }
            },
        })
    }

    /// One or more gated units of the same shapes and encodings, one after the other.
    fn gated(&mut self, prefixes: &[String]) -> Result<GatedMatrices, LoadError> {
        let name = |prefix: &str, projection: usize| format!("{prefix}.{}.weight", PROJECTIONS[projection]);
        let (format, inner, hidden) = self.stored(&name(&prefixes[0], 0))?;
        let (up_format, ..) = self.stored(&name(&prefixes[0], 1))?;
        if up_format != format {
            let what = format!("{} and up_proj in different encodings", name(&prefixes[0], 0));
            return Err(CudaError::Unsupported { operation: "a gated unit", what }.into());
        }
        let (down_format, ..) = self.stored(&name(&prefixes[0], 2))?;
        let gate_up = self.reserve(format, 2 * inner, hidden, prefixes.len(), 2 * prefixes.len())?;
        let down = self.reserve(down_format, hidden, inner, prefixes.len(), prefixes.len())?;
        let sizes = [gate_up, down].map(|matrix| matrix.format.matrix_bytes(matrix.rows, matrix.cols));
        for (index, prefix) in prefixes.iter().enumerate() {
            let (offset, scale) = (gate_up.offset + index * sizes[0], gate_up.scales + 2 * index);
            let up = Some(name(prefix, 1));
            self.items.push(Item { name: name(prefix, 0), up, target: Target::Strips { offset, scale, format } });
            let (offset, scale) = (down.offset + index * sizes[1], down.scales + index);
            self.put(&name(prefix, 2), Target::Strips { offset, scale, format: down_format });
        }
        Ok(GatedMatrices { gate_up, down })
    }

    /// A BF16 matrix.
    fn matrix(&mut self, name: &str) -> Result<Matrix, LoadError> {
        self.floating(name)?;
        let (format, rows, cols) = self.stored(name)?;
        let matrix = self.reserve(format, rows, cols, 1, 1)?;
        self.put(name, Target::Strips { offset: matrix.offset, scale: matrix.scales, format });
        Ok(matrix)
    }

    /// A BF16 matrix that is read row by row.
    fn rows(&mut self, name: &str) -> Result<usize, LoadError> {
        let (_, rows, cols) = self.floating(name)?;
        let offset = self.matrix_bytes.next_multiple_of(ALIGNMENT);
        self.matrix_bytes = offset + 2 * rows * cols;
        self.put(name, Target::Rows(offset));
        Ok(offset)
    }

    fn vector(&mut self, name: &str) -> Result<usize, LoadError> {
        let (_, rows, cols) = self.floating(name)?;
        let start = self.vector_len.next_multiple_of(ALIGNMENT);
        self.vector_len = start + rows * cols;
        self.put(name, Target::Vector(start));
        Ok(start)
    }

    fn bias(&mut self, name: String) -> usize {
        let start = self.bias_len;
        self.bias_len += self.checkpoint.config().num_experts;
        self.put(&name, Target::Bias(start));
        start
    }

    fn put(&mut self, name: &str, target: Target) {
        self.items.push(Item { name: name.to_owned(), up: None, target });
    }

    /// Room for `count` matrices of this shape and their global scales.
    fn reserve(
        &mut self,
        format: Format,
        rows: usize,
        cols: usize,
        count: usize,
        scales: usize,
    ) -> Result<Matrix, CudaError> {
        format.check(rows, cols)?;
        let offset = self.matrix_bytes.next_multiple_of(ALIGNMENT);
        self.matrix_bytes = offset + count * format.matrix_bytes(rows, cols);
        let matrix = Matrix { format, rows, cols, offset, scales: self.scale_len };
        self.scale_len += scales;
        Ok(matrix)
    }

    /// Format, rows and columns of a matrix.
    fn stored(&self, name: &str) -> Result<(Format, usize, usize), LoadError> {
        let spec = spec_of(self.checkpoint, name)?;
        let (rows, cols) = shape(spec);
        let format = Format::of(spec.encoding(), group(spec))?;
        Ok((if self.multiplies_fp4 { format.in_codes() } else { format }, rows, cols))
    }

    /// The same of a tensor that must be BF16.
    fn floating(&self, name: &str) -> Result<(Encoding, usize, usize), LoadError> {
        let spec = spec_of(self.checkpoint, name)?;
        let (rows, cols) = shape(spec);
        match spec.encoding() {
            encoding @ Encoding::Float(FloatType::Bf16) => Ok((encoding, rows, cols)),
            encoding => Err(LoadError::Encoding { name: name.to_owned(), encoding: encoding.to_string() }),
        }
    }
}

pub(super) fn spec_of<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<&'a TensorSpec, ReadError> {
    let tensor = checkpoint.tensors().get(name).ok_or_else(|| ReadError::NoTensor(name.to_owned()))?;
    Ok(&tensor.spec)
}

/// Rows and columns; a vector is one row.
pub(super) fn shape(spec: &TensorSpec) -> (usize, usize) {
    let cols = spec.shape().last();
    ((spec.shape().elements() / cols) as usize, cols as usize)
}

/// Columns that share a scale; 0 for floating encodings.
fn group(spec: &TensorSpec) -> usize {
    spec.group().map_or(0, |group| group.get())
}

impl DeviceWeights {
    /// Reads every tensor into its place. `verifies`: whether payloads are compared with their digests.
    pub(super) fn load(
        device: &Device,
        checkpoint: &Checkpoint,
        layout: &Layout,
        verifies: bool,
    ) -> Result<Self, LoadError> {
        let mut homes = Homes {
            matrices: device.zeroed(layout.matrix_bytes)?,
            vectors: device.zeroed(layout.vector_len)?,
            biases: device.zeroed(layout.bias_len)?,
            scales: device.zeroed(layout.scale_len)?,
        };
        load(device, checkpoint, &layout.items, &mut homes, verifies)?;
        let biases = homes.biases.to_vec()?;
        Ok(Self::assemble(layout, homes, &biases, checkpoint.config()))
    }

    fn assemble(layout: &Layout, homes: Homes, biases: &[f32], config: &ModelConfig) -> Self {
        let strips = |matrix: &Matrix| Strips {
            format: matrix.format,
            rows: matrix.rows,
            cols: matrix.cols,
            data: homes.matrices.at(matrix.offset),
            global_scales: match matrix.format {
                Format::Nvfp4 | Format::Nvfp4Codes => homes.scales.at(matrix.scales),
                _ => Pointer::null(),
            },
        };
        let gated = |gated: &GatedMatrices| Gated { gate_up: strips(&gated.gate_up), down: strips(&gated.down) };
        let layer = |layer: &LayerLayout| Layer {
            input_norm: homes.vectors.at(layer.input_norm),
            qkv: strips(&layer.qkv),
            query_norm: layer.head_norms.map_or(Pointer::null(), |norms| homes.vectors.at(norms[0])),
            key_norm: layer.head_norms.map_or(Pointer::null(), |norms| homes.vectors.at(norms[1])),
            dense: strips(&layer.dense),
            post_norm: homes.vectors.at(layer.post_norm),
            feed_forward: match &layer.feed_forward {
                FeedForwardLayout::Dense(matrices) => FeedForward::Dense(gated(matrices)),
                FeedForwardLayout::Experts { router, bias, routed, shared } => FeedForward::Experts {
                    router: strips(router),
                    bias: homes.biases.at(*bias),
                    host_bias: biases[*bias..][..config.num_experts].to_vec(),
                    routed: gated(routed),
                    shared: shared.as_ref().map(gated),
                },
            },
        };
        Self {
            layers: layout.layers.iter().map(layer).collect(),
            embedding: homes.matrices.at(layout.embedding).cast(),
            final_norm: homes.vectors.at(layout.final_norm),
            head: strips(&layout.head),
            _matrices: homes.matrices,
            _vectors: homes.vectors,
            _biases: homes.biases,
            _scales: homes.scales,
        }
    }
}

/// The four buffers that hold all weights.
pub(super) struct Homes {
    pub(super) matrices: Buffer<u8>,
    pub(super) vectors: Buffer<bf16>,
    pub(super) biases: Buffer<f32>,
    pub(super) scales: Buffer<f32>,
}
