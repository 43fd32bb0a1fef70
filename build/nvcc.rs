//! Compiles every `kernels/NAME.cu` to `OUT_DIR/NAME.fatbin` and writes `OUT_DIR/kernels.rs`, which
//! `src/cuda/kernels.rs` includes. Without nvcc the table is empty and the binary runs on the CPU.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, thread};

/// H200 (90), B200 (100) and RTX PRO 6000 (120), without the suffix `a`: such code runs on every GPU
/// of the same major version.
const ARCHITECTURES: &str = "90,100,120";

/// Where `make toolchain` puts nvcc.
const OWN_TOOLCHAIN: &str = ".toolchain/cuda/nvidia/cu13/bin";

/// The error is what to tell the user; it may have several lines.
pub fn embed_kernels() -> Result<(), String> {
    println!("cargo::rerun-if-changed=kernels");
    let architectures = variable("TALON_CUDA_ARCHS").unwrap_or_else(|| ARCHITECTURES.into());
    let required = variable("TALON_REQUIRE_KERNELS").is_some();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let Some(program) = find_nvcc() else {
        if required {
            return Err(
                "TALON_REQUIRE_KERNELS is set, but there is no nvcc: run `make toolchain`, \
                        or set NVCC or CUDA_HOME"
                    .into(),
            );
        }
        println!(
            "cargo::warning=no nvcc found: this build runs on the CPU only (`make toolchain` installs nvcc)"
        );
        return write_table(&out, &[], "");
    };
    let nvcc = Nvcc::new(program, &architectures)?;
    let sources = files("kernels", "cu")?;
    nvcc.compile_all(&sources, &out)?;
    write_table(&out, &sources, &format!("{} (nvcc {})", nvcc.targets(), nvcc.version))
}

/// An environment variable that the build depends on; an empty one counts as unset.
fn variable(name: &str) -> Option<String> {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn find_nvcc() -> Option<PathBuf> {
    let home = variable("CUDA_HOME").map(|home| Path::new(&home).join("bin"));
    // A compiler that was asked for by name is used or fails; the places below may lack one.
    let found = variable("NVCC").map(PathBuf::from).or_else(|| {
        let path = env::var_os("PATH").unwrap_or_default();
        let mut folders = home.into_iter().chain(env::split_paths(&path));
        let elsewhere = folders.find(|folder| folder.join("nvcc").is_file());
        let folder = elsewhere.unwrap_or_else(|| OWN_TOOLCHAIN.into());
        Some(folder.join("nvcc")).filter(|program| program.is_file())
    })?;
    if found.is_file() {
        println!("cargo::rerun-if-changed={}", found.display());
    }
    Some(found)
}

/// The files of a folder with this extension, sorted.
fn files(folder: &str, extension: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{folder}: {error}"))?;
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut found: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
    found.sort();
    Ok(found)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// A compiler with the options that all kernels share.
struct Nvcc {
    program: PathBuf,
    version: String,
    architectures: Vec<u32>,
    /// Changes with everything but the source file itself that a fatbin depends on.
    key: DefaultHasher,
}

impl Nvcc {
    fn new(program: PathBuf, architectures: &str) -> Result<Self, String> {
        let number = |text: &str| {
            text.trim().parse::<u32>().map_err(|_| {
                format!("TALON_CUDA_ARCHS={architectures}: expected a list such as {ARCHITECTURES}")
            })
        };
        let mut architectures =
            architectures.split(',').map(number).collect::<Result<Vec<_>, _>>()?;
        architectures.sort_unstable();
        architectures.dedup();
        let output = Command::new(&program)
            .arg("--version")
            .output()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let (_, version) = text.split_once(", V").ok_or_else(|| {
            format!("{} --version names no version: {}", program.display(), text.trim())
        })?;
        let version = version.split_whitespace().next().unwrap_or_default().to_owned();

        let mut nvcc = Self { program, version, architectures, key: DefaultHasher::new() };
        nvcc.version.hash(&mut nvcc.key);
        nvcc.options().hash(&mut nvcc.key);
        for header in files("kernels", "cuh")? {
            (&header, read(&header)?).hash(&mut nvcc.key);
        }
        Ok(nvcc)
    }

    fn options(&self) -> Vec<String> {
        let mut options: Vec<_> = ["-fatbin", "-std=c++17", "-O3", "-I", "kernels"]
            .into_iter()
            .map(str::to_owned)
            .collect();
        let target = |from: u32, code: String| {
            ["-gencode".into(), format!("arch=compute_{from},code={code}")]
        };
        for &number in &self.architectures {
            options.extend(target(number, format!("sm_{number}")));
        }
        // PTX of the oldest, which the driver compiles for a GPU that is newer than all of them.
        let oldest = self.architectures[0];
        options.extend(target(oldest, format!("compute_{oldest}")));
        options
    }

    fn targets(&self) -> String {
        let names: Vec<_> =
            self.architectures.iter().map(|number| format!("sm_{number}")).collect();
        names.join(" ")
    }

    /// Several files at once; the error holds the messages of all that failed.
    fn compile_all(&self, sources: &[PathBuf], out: &Path) -> Result<(), String> {
        let threads = env::var("NUM_JOBS").ok().and_then(|text| text.parse().ok());
        let threads = threads.or_else(|| thread::available_parallelism().ok().map(NonZero::get));
        let queue = Mutex::new(sources.iter());
        let errors = Mutex::new(Vec::new());
        let work = || {
            loop {
                let Some(source) = queue.lock().expect("no worker panics").next() else { return };
                if let Err(error) = self.compile(source, out) {
                    errors.lock().expect("no worker panics").push(error);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..threads.unwrap_or(1).min(sources.len()) {
                scope.spawn(work);
            }
        });
        let errors = errors.into_inner().expect("no worker panics");
        if errors.is_empty() { Ok(()) } else { Err(errors.join("\n")) }
    }

    /// Does nothing where the fatbin of the same source, headers and options is there: cargo runs
    /// the build script after every commit, and kernels take long to compile.
    fn compile(&self, source: &Path, out: &Path) -> Result<(), String> {
        let fatbin = out.join(stem(source)).with_extension("fatbin");
        let key_file = fatbin.with_extension("key");
        let mut key = self.key.clone();
        read(source)?.hash(&mut key);
        let key = format!("{:016x}", key.finish());
        if fatbin.is_file() && fs::read_to_string(&key_file).is_ok_and(|known| known == key) {
            return Ok(());
        }
        // The key is written last, so that a build that is cut short leaves none.
        let _ = fs::remove_file(&key_file);
        let output = Command::new(&self.program)
            .args(self.options())
            .arg("-o")
            .arg(&fatbin)
            .arg(source)
            .output()
            .map_err(|error| format!("{}: {error}", self.program.display()))?;
        let message =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        let message = message.concat();
        if !output.status.success() {
            return Err(format!(
                "{}\n{}: not compiled by {} {} for {} (NVCC and TALON_CUDA_ARCHS choose others)",
                message.trim_end(),
                source.display(),
                self.program.display(),
                self.version,
                self.targets(),
            ));
        }
        for line in message.lines().filter(|line| !line.trim().is_empty()) {
            println!("cargo::warning={line}");
        }
        write(&key_file, &key)
    }
}

/// The table of fatbins as Rust source.
fn write_table(out: &Path, sources: &[PathBuf], targets: &str) -> Result<(), String> {
    let entry = |source: &PathBuf| {
        let stem = stem(source);
        format!("    ({stem:?}, &Aligned(*include_bytes!(\"{stem}.fatbin\")).0),\n")
    };
    let entries: String = sources.iter().map(entry).collect();
    let table = format!(
        "/// Stem of each file `kernels/NAME.cu`, and its fatbin.\n\
         pub static FATBINS: &[(&str, &[u8])] = &[\n{entries}];\n\
         /// The GPUs that they are compiled for, and by which nvcc; empty without nvcc.\n\
         pub static TARGETS: &str = {targets:?};\n"
    );
    write(&out.join("kernels.rs"), &table)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}
