//! The router and the rotary tables against golden results.

use minnow_common::{BLOCK, Routing};
use minnow_kernels::conformance::random;
use minnow_kernels::cpu;
use minnow_kernels::ops::RouterRules;
use minnow_kernels::oracle;
use minnow_tests::golden;
use safetensors::SafeTensors;

fn f32s(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let tensor = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(tensor.dtype(), safetensors::Dtype::F32);
    tensor.data().as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

fn u32s(tensors: &SafeTensors<'_>, name: &str) -> Vec<u32> {
    let tensor = tensors.tensor(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(tensor.dtype(), safetensors::Dtype::I32);
    tensor.data().as_chunks::<4>().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
}

#[test]
fn experts_are_chosen_as_in_the_golden_file_exact_ties_included() {
    let bytes = golden::bytes("golden/model/routing.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut checked = 0;
    for case in 0..6 {
        let [experts, k, capacity, groups, kept, rows] = u32s(&tensors, &format!("{case}.params"))[..]
            .try_into()
            .map(|params: [u32; 6]| params.map(|n| n as usize))
            .expect("six numbers");
        let (scores, bias) = (f32s(&tensors, &format!("{case}.scores")), f32s(&tensors, &format!("{case}.bias")));
        assert_eq!((bias.len(), scores.len()), (experts, rows * experts));
        for (name, routing) in [("block", Routing::Block { capacity }), ("group", Routing::Groups { groups, kept })] {
            if tensors.tensor(&format!("{case}.{name}.ids")).is_err() {
                continue;
            }
            let rules = RouterRules { routing, experts_per_token: k, scale: 2.5 };
            let (mut ids, mut weights) = (vec![0; rows * k], vec![0.0; rows * k]);
            oracle::route(&mut ids, &mut weights, &scores, &bias, &rules);
            assert_eq!(ids, u32s(&tensors, &format!("{case}.{name}.ids")), "{case} {name}");
            for (found, expected) in weights.iter().zip(f32s(&tensors, &format!("{case}.{name}.weights"))) {
                // The sum may be taken in another order: a few roundings.
                assert!((found - expected).abs() <= 4.0 * f32::EPSILON * expected.abs(), "{found}, {expected}");
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 12);
}

#[test]
fn rotary_tables_are_the_golden_ones() {
    let bytes = golden::bytes("golden/model/rope.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    for (name, theta) in [("theta_3e6", 3e6), ("theta_6e5", 6e5)] {
        let inv_freq = oracle::inv_freq(theta, 64);
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&inv_freq), bits(&f32s(&tensors, name)), "{name}");
        for position in [1, 31, 4097, 131_071] {
            let (mut cos, mut sin) = ([0.0; 32], [0.0; 32]);
            oracle::rope_tables(&mut cos, &mut sin, &inv_freq, position);
            for (table, found) in [("cos", cos), ("sin", sin)] {
                for (found, expected) in found.iter().zip(f32s(&tensors, &format!("{name}.{table}.{position}"))) {
                    // Both are f64 results rounded to f32; libraries may differ in the last bit of the f64.
                    assert!((found - expected).abs() <= f32::EPSILON / 2.0, "{name}.{table}.{position}");
                }
            }
        }
    }
}

#[test]
fn the_quick_router_chooses_as_the_oracle_does() {
    let (rows, experts) = (3 * BLOCK, 64);
    for (name, routing) in [
        ("block", Routing::Block { capacity: 12 }),
        ("all", Routing::Block { capacity: 64 }),
        ("groups", Routing::Groups { groups: 8, kept: 3 }),
    ] {
        for experts_per_token in [1, 4] {
            let mut scores: Vec<f32> = random(name, rows * experts).iter().map(|value| value.abs()).collect();
            // Ties in plenty, NaN, and a row of nothing else.
            scores.iter_mut().step_by(3).for_each(|score| *score = (*score * 8.0).round() / 8.0);
            scores.iter_mut().step_by(97).for_each(|score| *score = f32::NAN);
            scores[5 * experts..6 * experts].fill(f32::NAN);
            let bias: Vec<f32> = random("bias", experts).iter().map(|value| (value * 4.0).round() / 8.0).collect();
            let rules = RouterRules { routing, experts_per_token, scale: 2.5 };
            let choices = |route: &dyn Fn(&mut [u32], &mut [f32])| {
                let (mut ids, mut weights) = (vec![0; rows * experts_per_token], vec![0.0; rows * experts_per_token]);
                route(&mut ids, &mut weights);
                (ids, weights.iter().map(|weight| weight.to_bits()).collect::<Vec<_>>())
            };
            let expected = choices(&|ids, weights| oracle::route(ids, weights, &scores, &bias, &rules));
            let found = choices(&|ids, weights| cpu::route(ids, weights, &scores, &bias, &rules));
            assert_eq!(found, expected, "{name}, {experts_per_token} experts a token");
        }
    }
}
