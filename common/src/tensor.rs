//! What is known of a tensor besides its bytes, in a form that cannot be inconsistent.

use thiserror::Error;

use crate::quant::{Encoding, GroupSize};
use crate::shape::Shape;

/// Shape, encoding and quantization parameters of one tensor. Made by [`TensorSpec::new`], which checks them together.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    shape: Shape,
    encoding: Encoding,
    group: Option<GroupSize>,
    global_scale: Option<f32>,
    data_bytes: u64,
    scales_bytes: u64,
}

/// Why shape, encoding, group and global scale do not go together.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum TensorSpecError {
    /// The data region would not fit 64 bits.
    #[error("the byte count overflows 64 bits")]
    Overflow,
    /// A floating tensor has a group size or a global scale.
    #[error("a floating tensor has no group size and no global scale")]
    FloatMetadata,
    /// A packed encoding does not tile the shape.
    #[error("{encoding} needs a matrix of 8 x {cols} tiles, not shape {shape}")]
    Packed {
        /// The encoding asked for.
        encoding: Encoding,
        /// Columns of its tile.
        cols: u64,
        /// The shape it does not fit.
        shape: Shape,
    },
    /// Not one of the four sizes, missing, not dividing the row, or not 16 for NVFP4.
    #[error("group size {group} does not fit {encoding} with rows of {row} elements")]
    Group {
        /// The encoding.
        encoding: Encoding,
        /// The group size given; 0 for none.
        group: u64,
        /// The innermost dimension.
        row: u64,
    },
    /// Missing for NVFP4, present elsewhere, or not a positive finite number.
    #[error("global scale {found:?} does not fit {encoding}")]
    GlobalScale {
        /// The encoding.
        encoding: Encoding,
        /// The scale given.
        found: Option<f32>,
    },
}

impl TensorSpec {
    /// Checks all parameters together. `group` is 0 for floating tensors.
    pub fn new(
        shape: Shape,
        encoding: Encoding,
        group: u64,
        global_scale: Option<f32>,
    ) -> Result<Self, TensorSpecError> {
        let data_bytes = encoding.data_bytes(shape.elements()).ok_or(TensorSpecError::Overflow)?;
        if !encoding.is_quantized() {
            if group != 0 || global_scale.is_some() {
                return Err(TensorSpecError::FloatMetadata);
            }
            return Ok(Self { shape, encoding, group: None, global_scale: None, data_bytes, scales_bytes: 0 });
        }
        if !encoding.fits(&shape) {
            let cols = encoding.tile().map_or(1, |tile| tile.cols);
            return Err(TensorSpecError::Packed { encoding, cols, shape });
        }
        let is_nvfp4 = encoding == Encoding::Nvfp4;
        let scale_fits = match global_scale {
            Some(scale) => is_nvfp4 && scale.is_finite() && scale > 0.0,
            None => !is_nvfp4,
        };
        if !scale_fits {
            return Err(TensorSpecError::GlobalScale { encoding, found: global_scale });
        }
        let wrong_group = TensorSpecError::Group { encoding, group, row: shape.last() };
        let group = GroupSize::new(group).map_err(|_| wrong_group.clone())?;
        if !shape.last().is_multiple_of(group.get() as u64) || (is_nvfp4 && group != GroupSize::NVFP4) {
            return Err(wrong_group);
        }
        let scales_bytes = encoding.scales_bytes(shape.elements(), group);
        Ok(Self { shape, encoding, group: Some(group), global_scale, data_bytes, scales_bytes })
    }

    /// The dimensions.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The encoding.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The group size; `None` for floating tensors.
    #[must_use]
    pub fn group(&self) -> Option<GroupSize> {
        self.group
    }

    /// The matrix-wide scale of NVFP4; `None` elsewhere.
    #[must_use]
    pub fn global_scale(&self) -> Option<f32> {
        self.global_scale
    }

    /// Bytes of the data region.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Bytes of the scales region; 0 for floating tensors.
    #[must_use]
    pub fn scales_bytes(&self) -> u64 {
        self.scales_bytes
    }
}

/// Whether a tensor is a routed expert's weight, the only kind that may be quantized: its name contains `.experts.`
/// and ends with `.weight` (so `shared_experts` is not one). `mnw-format.md` section 10.2.
#[must_use]
pub fn is_expert(name: &str) -> bool {
    name.contains(".experts.") && name.ends_with(".weight")
}

/// The projection an expert tensor belongs to: the text before `.experts.` and the text after the expert's number.
/// All members must share encoding and group. `None` if the name has no `.` after `.experts.N`.
#[must_use]
pub fn expert_family(name: &str) -> Option<(&str, &str)> {
    let (prefix, rest) = name.rsplit_once(".experts.")?;
    let (_, projection) = rest.split_once('.')?;
    Some((prefix, projection))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::FloatType;

    #[test]
    fn inconsistent_parameters_are_refused() {
        let matrix = || Shape::matrix(64, 128);
        let float = Encoding::Float(FloatType::Bf16);
        assert!(TensorSpec::new(matrix(), float, 0, None).is_ok());
        assert_eq!(TensorSpec::new(matrix(), float, 32, None), Err(TensorSpecError::FloatMetadata));
        assert_eq!(TensorSpec::new(matrix(), float, 0, Some(1.0)), Err(TensorSpecError::FloatMetadata));
        assert!(TensorSpec::new(matrix(), Encoding::I4Mma, 128, None).is_ok());
        assert!(matches!(TensorSpec::new(matrix(), Encoding::I4Mma, 256, None), Err(TensorSpecError::Group { .. })));
        assert!(matches!(TensorSpec::new(matrix(), Encoding::I4Mma, 0, None), Err(TensorSpecError::Group { .. })));
        assert!(matches!(
            TensorSpec::new(Shape::matrix(4, 128), Encoding::I8Mma, 128, None),
            Err(TensorSpecError::Packed { .. })
        ));
        assert!(TensorSpec::new(matrix(), Encoding::Nvfp4, 16, Some(0.5)).is_ok());
        for scale in [None, Some(0.0), Some(-1.0), Some(f32::NAN), Some(f32::INFINITY)] {
            assert!(matches!(
                TensorSpec::new(matrix(), Encoding::Nvfp4, 16, scale),
                Err(TensorSpecError::GlobalScale { .. })
            ));
        }
        assert!(matches!(
            TensorSpec::new(matrix(), Encoding::Nvfp4, 32, Some(1.0)),
            Err(TensorSpecError::Group { .. })
        ));
    }

    #[test]
    fn experts_are_told_from_shared_experts() {
        let expert = "model.layers.1.mlp.experts.17.down_proj.weight";
        assert!(is_expert(expert));
        assert_eq!(expert_family(expert), Some(("model.layers.1.mlp", "down_proj.weight")));
        assert!(!is_expert("model.layers.1.mlp.shared_experts.down_proj.weight"));
        assert!(!is_expert("model.layers.1.mlp.gate.expert_bias"));
        assert_eq!(expert_family("model.layers.1.mlp.experts.17"), None);
    }
}
