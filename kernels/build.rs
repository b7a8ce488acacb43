//! Compiles `cu/**/*.cu` into one fatbin a file, under feature `cuda`; without it this does nothing.
//!
//! A fatbin holds machine code for every target of [`TARGETS`] that its file is for, and PTX of the oldest, which the
//! driver compiles for GPUs that no machine code fits. A file whose name ends in `_sm90a` or `_sm120f` is for that
//! target alone. `MINNOW_CUDA_ARCH=80` or `80,90a` limits the targets; `MINNOW_CUDA_LINES=1` keeps the numbers of source
//! lines, for NVIDIA's tools. What did not change is not compiled again, also not for another profile or set of features:
//! fatbins are kept beside the profiles' folders, under a key that covers the file, the headers it includes, the command
//! and the compiler.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    cuda::compile();
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::collections::BTreeSet;
    use std::hash::{DefaultHasher, Hash, Hasher};
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::{env, fs, process, thread};

    /// Targets by default, oldest first: every GPU from Ampere on, Hopper's own and Blackwell's own instructions.
    const TARGETS: [&str; 3] = ["80", "90a", "120f"];

    const HOW_TO_GET_NVCC: &str = "feature `cuda` needs nvcc of CUDA 13.0, which was not found through NVCC, PATH, \
         CUDA_HOME or the usual folders. Install NVIDIA's CUDA toolkit, or, without root: \
         `pip download --no-deps nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
         nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85`, unpack all of them into one folder, and set NVCC to \
         its bin/nvcc; docs/cuda.md has the commands. Or build without feature `cuda`.";

    /// A file to compile.
    struct Job {
        source: PathBuf,
        name: String,
        targets: Vec<String>,
    }

    pub fn compile() {
        for variable in
            ["MINNOW_CUDA_ARCH", "MINNOW_CUDA_LINES", "MINNOW_CUDA_RACECHECK", "NVCC", "NVCC_CCBIN", "CUDA_HOME"]
        {
            println!("cargo::rerun-if-env-changed={variable}");
        }
        println!("cargo::rerun-if-changed=cu");
        let nvcc = match cudaforge::CudaToolkit::detect() {
            Ok(toolkit) => toolkit.nvcc_path,
            Err(error) => fail(&format!("{error}: {HOW_TO_GET_NVCC}")),
        };
        let version = Command::new(&nvcc).arg("--version").output().map(|output| output.stdout);
        let version = version.unwrap_or_else(|error| fail(&format!("{} cannot be run: {error}", nvcc.display())));
        let wanted = match env::var("MINNOW_CUDA_ARCH") {
            Ok(list) => list.split(',').map(|target| target.trim().to_owned()).collect(),
            Err(_) => TARGETS.map(str::to_owned).to_vec(),
        };
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
        let jobs = jobs(&wanted);

        let next = AtomicUsize::new(0);
        let workers = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(2);
        let failures: Vec<String> = thread::scope(|scope| {
            let work = || {
                let mut failures = Vec::new();
                while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    failures.extend(compile_one(&nvcc, &version, job, &out).err());
                }
                failures
            };
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("a compile thread")).collect()
        });
        if !failures.is_empty() {
            fail(&failures.join("\n"));
        }
        let entry = |job: &Job| {
            let path = out.join(format!("{}.fatbin", job.name));
            format!("    ({:?}, include_bytes!({:?})),\n", job.name, path.display().to_string())
        };
        let entries: String = jobs.iter().map(entry).collect();
        let list = format!("pub static FATBINS: &[(&str, &[u8])] = &[\n{entries}];\n");
        fs::write(out.join("fatbins.rs"), list).expect("OUT_DIR is writable");
    }

    /// Files below `cu/` with the targets they are for; those for none of the wanted ones are left out.
    fn jobs(wanted: &[String]) -> Vec<Job> {
        let mut files = Vec::new();
        files_below(Path::new("cu"), &mut files);
        files.sort();
        let jobs = files.into_iter().filter(|file| file.extension().is_some_and(|extension| extension == "cu"));
        let jobs = jobs.map(|source| {
            let name = source.file_stem().and_then(|stem| stem.to_str()).expect("a UTF-8 file name").to_owned();
            let own = name.rsplit_once("_sm").map(|(_, target)| target.to_owned());
            let own = own.filter(|target| TARGETS.contains(&target.as_str()));
            let fits = |target: &&String| own.as_ref().is_none_or(|own| own == *target);
            Job { targets: wanted.iter().filter(fits).cloned().collect(), source, name }
        });
        jobs.filter(|job| !job.targets.is_empty()).collect()
    }

    fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("the folder cu") {
            let path = entry.expect("a readable entry").path();
            if path.is_dir() { files_below(&path, found) } else { found.push(path) }
        }
    }

    fn compile_one(nvcc: &Path, version: &[u8], job: &Job, out: &Path) -> Result<(), String> {
        let mut command = Command::new(nvcc);
        command.args(["-fatbin", "-O3", "-std=c++17", "--compress-mode=size", "-I", "cu", "-Werror", "all-warnings"]);
        if env::var_os("MINNOW_CUDA_LINES").is_some() {
            command.arg("-lineinfo");
        }
        if env::var_os("MINNOW_CUDA_RACECHECK").is_some() {
            command.arg("-DMINNOW_RACECHECK");
        }
        for target in &job.targets {
            command.arg(format!("-gencode=arch=compute_{target},code=sm_{target}"));
        }
        // PTX of an arch with a letter runs on that arch only, so it would help nobody.
        if let Some(oldest) = job.targets.first().filter(|target| target.bytes().all(|byte| byte.is_ascii_digit())) {
            command.arg(format!("-gencode=arch=compute_{oldest},code=compute_{oldest}"));
        }
        if let Ok(host_compiler) = env::var("NVCC_CCBIN") {
            command.args(["-ccbin", &host_compiler]);
        }
        command.arg(&job.source);

        let mut hasher = DefaultHasher::new();
        format!("{command:?}").hash(&mut hasher);
        version.hash(&mut hasher);
        hash_with_headers(&job.source, &mut BTreeSet::new(), &mut hasher);
        // OUT_DIR is four folders below the target folder: profile, `build`, package, `out`.
        let kept = out.ancestors().nth(4).unwrap_or(out).join("minnow-fatbins");
        let kept = kept.join(format!("{}-{:016x}.fatbin", job.name, hasher.finish()));
        let fatbin = out.join(format!("{}.fatbin", job.name));
        if !kept.exists() {
            let folder = kept.parent().unwrap_or(out);
            fs::create_dir_all(folder).map_err(|error| format!("{} cannot be made: {error}", folder.display()))?;
            // Under a name of this process until it is whole: others may be building the same.
            let unfinished = kept.with_extension(process::id().to_string());
            command.arg("-o").arg(&unfinished);
            let output = command.output().map_err(|error| format!("{} cannot be run: {error}", nvcc.display()))?;
            if !output.status.success() {
                let messages = String::from_utf8_lossy(&output.stderr).into_owned();
                return Err(format!("nvcc refuses {}:\n{messages}", job.source.display()));
            }
            fs::rename(&unfinished, &kept).map_err(|error| format!("{}: {error}", kept.display()))?;
        }
        fs::copy(&kept, &fatbin).map(drop).map_err(|error| format!("{}: {error}", fatbin.display()))
    }

    /// Hashes a file and every file it includes with quotes, from its own folder or from `cu`.
    fn hash_with_headers(file: &Path, seen: &mut BTreeSet<PathBuf>, hasher: &mut DefaultHasher) {
        if !seen.insert(file.to_owned()) {
            return;
        }
        let Ok(text) = fs::read_to_string(file) else { return };
        text.hash(hasher);
        for header in text.lines().filter_map(|line| line.trim().strip_prefix("#include \"")) {
            let name = header.split('"').next().unwrap_or_default();
            let beside = file.with_file_name(name);
            let found = if beside.exists() { beside } else { Path::new("cu").join(name) };
            hash_with_headers(&found, seen, hasher);
        }
    }

    fn fail(message: &str) -> ! {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
        process::exit(1);
    }
}
