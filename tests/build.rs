//! Compiles `cuda/emulation.cpp` for the host, under feature `cuda`; without it this does nothing.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    {
        for path in ["cuda/emulation.cpp", "../kernels/cu/common"] {
            println!("cargo::rerun-if-changed={path}");
        }
        // Products are not to be contracted: nvcc does not do so where nothing is added.
        let mut build = cc::Build::new();
        build.cpp(true).std("c++17").include("../kernels/cu").flag("-ffp-contract=off").opt_level(2);
        build.warnings_into_errors(true).file("cuda/emulation.cpp").compile("minnow_fp4_emulation");
    }
}
