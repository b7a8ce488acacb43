//! Matrices in their stored form.

use minnow_common::{Encoding, FloatType, GroupSize, Shape, TensorSpec};

use super::random;
use crate::codec;
use crate::matrix::WeightMatrix;

/// A matrix with its bytes, which start at an odd address so that no backend comes to rely on alignment.
#[derive(Clone, Debug)]
pub struct StoredMatrix {
    spec: TensorSpec,
    /// One byte, then the data.
    data: Vec<u8>,
    /// One byte, then the scales.
    scales: Vec<u8>,
}

impl StoredMatrix {
    /// A matrix of random values, scaled so that products with rows of `[-1, 1)` stay near one, in an encoding.
    /// `group` is 0 for floating encodings.
    ///
    /// # Panics
    /// If the encoding cannot hold the shape: a fault of the table.
    #[must_use]
    pub fn random(name: &str, rows: usize, cols: usize, encoding: Encoding, group: u64) -> Self {
        let scale = (3.0 / cols as f32).sqrt();
        let values: Vec<f32> = random(name, rows * cols).into_iter().map(|value| value * scale).collect();
        let (data, scales, global_scale) = match encoding {
            Encoding::Float(float) => (narrowed(&values, float), Vec::new(), None),
            _ => {
                let group = GroupSize::new(group).expect("a group size");
                let encoded = codec::encode(&values, rows, cols, encoding, group).expect("an encodable case");
                (encoded.data, encoded.scales, encoded.global_scale)
            }
        };
        let spec = TensorSpec::new(Shape::matrix(rows, cols), encoding, group, global_scale).expect("a valid case");
        let behind_a_byte = |bytes: Vec<u8>| [vec![0xff], bytes].concat();
        Self { spec, data: behind_a_byte(data), scales: behind_a_byte(scales) }
    }

    /// The matrix as backends see it.
    #[must_use]
    pub fn view(&self) -> WeightMatrix<'_> {
        WeightMatrix::new(&self.spec, &self.data[1..], &self.scales[1..]).expect("bytes made for this spec")
    }

    /// Codes of an integer encoding as whole numbers, row-major: its values with every scale one.
    ///
    /// # Panics
    /// If it has no FP16 scales: a fault of the table.
    #[must_use]
    pub fn codes(&self) -> Vec<f32> {
        let ones: Vec<u8> = half::f16::ONE.to_le_bytes().repeat(self.scales.len() / 2);
        codec::decode(&self.data[1..], &ones, &self.spec).expect("an integer encoding")
    }

    /// Scales of an integer encoding, `[rows, groups]`: values of its groups with every code one.
    ///
    /// # Panics
    /// If it is no integer encoding: a fault of the table.
    #[must_use]
    pub fn group_scales(&self) -> Vec<f32> {
        let one = if matches!(self.spec.encoding(), Encoding::I4Sym | Encoding::I4Mma) { 0x11 } else { 1 };
        let ones = vec![one; self.data.len() - 1];
        let values = codec::decode(&ones, &self.scales[1..], &self.spec).expect("an integer encoding");
        values.into_iter().step_by(self.view().group()).collect()
    }

    /// Its values, row-major.
    #[must_use]
    pub fn values(&self) -> Vec<f32> {
        codec::decode(&self.data[1..], &self.scales[1..], &self.spec).expect("bytes made for this spec")
    }
}

fn narrowed(values: &[f32], float: FloatType) -> Vec<u8> {
    let of = |value: &f32| match float {
        FloatType::Bf16 => half::bf16::from_f32(*value).to_le_bytes().to_vec(),
        FloatType::F16 => half::f16::from_f32(*value).to_le_bytes().to_vec(),
        FloatType::F32 => value.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(of).collect()
}
