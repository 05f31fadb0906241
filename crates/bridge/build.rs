//! Compiles the bridge against torch-sys's libtorch, after checking its version.

use std::path::{Path, PathBuf};

/// The version that tch 0.24 and the bridge are written for.
const LIBTORCH: &str = "2.11.0";
/// What is compiled once: `cpp/NAME.cc`. The files of a unit are compiled as one, because
/// libtorch's headers take most of the time that a file takes.
const UNITS: &[(&str, &[&str])] = &[
    (
        "layers",
        &[
            "attention",
            "convolution",
            "fused",
            "images",
            "kernels",
            "linear",
            "loss",
            "optim",
            "product",
            "random",
        ],
    ),
    ("graphs", &["custom", "hollow", "layout", "ledger", "op_cache", "saved", "split", "vjp"]),
    ("devices", &["allocator", "c10d", "device", "gpu_group", "offload", "threads"]),
];

fn main() {
    if std::env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        // Documentation needs neither libtorch nor the C++.
        println!("cargo:rustc-env=GPIPE_LIBTORCH_VERSION={LIBTORCH}");
        println!("cargo:rustc-env=GPIPE_LIBTORCH_LIB=");
        return;
    }
    let lib = std::env::var("DEP_TCH_LIBTORCH_LIB").unwrap_or_else(|_| {
        fail("torch-sys did not say where libtorch is: run `make setup` (or set LIBTORCH)")
    });
    let lib = std::fs::canonicalize(&lib)
        .unwrap_or_else(|error| fail(&format!("{lib}: {error}: run `make setup` again")));
    let torch = lib.parent().map(Path::to_path_buf).unwrap_or_default();
    let version = version_of(&torch);
    println!("cargo:rustc-env=GPIPE_LIBTORCH_VERSION={version}");

    let mut bridge = cxx_build::bridge("src/ffi.rs");
    if std::env::var_os("CARGO_FEATURE_ALLOCATOR").is_some() {
        bridge.define("GPIPE_ALLOCATOR", None);
    }
    if let Some(headers) = nccl(&torch) {
        bridge.define("GPIPE_NCCL", None).includes(headers);
        // A warning about CUDA's own headers.
        bridge.flag_if_supported("-Wno-interference-size");
        for library in ["torch_cuda", "c10_cuda"] {
            println!("cargo:rustc-link-lib=dylib={library}");
        }
    }
    bridge
        .files(units())
        .includes([torch.join("include"), PathBuf::from("cpp")])
        // c10d's headers include headers from here.
        .include(torch.join("include/torch/csrc/api/include"))
        .std("c++17")
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        // As libtorch is built: its headers have other members in its classes without it.
        .define("NDEBUG", None)
        .flag_if_supported("-Wno-unused-parameter")
        .flag_if_supported("-Wno-sign-compare")
        // GCC takes an included file for a header, and warns of classes there that use an anonymous
        // namespace.
        .flag_if_supported("-Wno-subobject-linkage")
        // at::parallel_for is a plain loop without it. The runtime is the one that libtorch has.
        .flag("-fopenmp")
        .opt_level(2)
        // Debug information of the headers would add a hundred megabytes to everything that links
        // with this.
        .debug(false);
    // Clippy links nothing, and Cargo does not share what it builds with other commands: without
    // this the C++ would be compiled twice.
    let is_clippy = std::env::var("RUSTC_WORKSPACE_WRAPPER")
        .is_ok_and(|wrapper| Path::new(&wrapper).ends_with("clippy-driver"));
    if !is_clippy {
        compile_kernels(&torch);
        bridge.compile("gpipe_bridge");
    }
    for file in ["src/ffi.rs", "cpp"] {
        println!("cargo:rerun-if-changed={file}");
    }
    println!("cargo:libtorch_lib={}", lib.display());
    println!("cargo:rustc-env=GPIPE_LIBTORCH_LIB={}", lib.display());
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=dylib:+verbatim=libgomp.so.1");
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());
}

/// Writes a file for each unit that includes the unit's files. Returns the paths.
fn units() -> Vec<PathBuf> {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    let of = |(unit, files): &(&str, &[&str])| {
        let includes: String =
            files.iter().map(|file| format!("#include \"{file}.cc\"\n")).collect();
        let path = out.join(format!("{unit}.cc"));
        std::fs::write(&path, includes)
            .unwrap_or_else(|error| fail(&format!("{}: {error}", path.display())));
        path
    };
    UNITS.iter().map(of).collect()
}

/// Compiles the kernels once for each width of vector registers. `kernels.cc` chooses among them
/// when the program runs.
fn compile_kernels(torch: &Path) {
    let is_x86 = std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    let widths: &[(&str, &str, &[&str])] = &[
        ("plain", "DEFAULT", &[]),
        ("avx2", "AVX2", &["-mavx2", "-mfma", "-mf16c"]),
        (
            "avx512",
            "AVX512",
            &["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
        ),
    ];
    for (name, capability, flags) in widths.iter().take(if is_x86 { 3 } else { 1 }) {
        let mut build = cc::Build::new();
        build
            .cpp(true)
            .files([
                "cpp/attention_kernels.cc",
                "cpp/fused_kernels.cc",
                "cpp/image_kernels.cc",
                "cpp/product_kernels.cc",
            ])
            .include(torch.join("include"))
            .std("c++17")
            .define("_GLIBCXX_USE_CXX11_ABI", "1")
            .define("NDEBUG", None)
            .define("CPU_CAPABILITY", *capability)
            .define(&format!("CPU_CAPABILITY_{capability}"), None)
            .define("GPIPE_FLOAT", &*format!("fused_float_{name}"))
            .define("GPIPE_BFLOAT16", &*format!("fused_bfloat16_{name}"))
            .define("GPIPE_ATTENTION_FLOAT", &*format!("attention_float_{name}"))
            .define("GPIPE_ATTENTION_BFLOAT16", &*format!("attention_bfloat16_{name}"))
            .define("GPIPE_PRODUCTS", &*format!("products_{name}"))
            .define("GPIPE_IMAGES", &*format!("images_{name}"))
            // Products and sums are rounded one by one, as by libtorch's separate operations.
            .flag("-ffp-contract=off")
            .flag_if_supported("-Wno-psabi")
            // Those of libtorch's and the compiler's headers are many.
            .warnings(false)
            .opt_level(3)
            .debug(false);
        flags.iter().for_each(|flag| {
            build.flag(flag);
        });
        build.compile(&format!("gpipe_kernels_{name}"));
    }
}

/// The folders of the headers that NCCL's process group needs, if `torch` is a libtorch with CUDA
/// and they are beside it, where PyTorch's packages put them. Without them GPUs of different
/// processes exchange values through Gloo alone.
fn nccl(torch: &Path) -> Option<Vec<PathBuf>> {
    let packages = torch.parent()?.join("nvidia");
    let cuda = packages.join("cu13/include");
    let needed = [
        torch.join("lib/libtorch_cuda.so"),
        torch.join("include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"),
        packages.join("nccl/include/nccl.h"),
        cuda.join("cuda_runtime.h"),
        cuda.join("crt/host_config.h"),
        cuda.join("cccl"),
    ];
    let there = needed.iter().all(|path| path.exists());
    there.then(|| vec![packages.join("nccl/include"), cuda.join("cccl"), cuda])
}

/// The version of a libtorch and its build, such as `2.11.0+cpu`. Rejects any other version.
fn version_of(torch: &Path) -> String {
    let says = |name: &str| std::fs::read_to_string(torch.join(name)).unwrap_or_default();
    let (built, python) = (says("build-version"), says("version.py"));
    let found = if built.is_empty() {
        python.lines().find_map(|line| line.strip_prefix("__version__ = '")).unwrap_or_default()
    } else {
        built.trim()
    };
    let found = found.split('\'').next().unwrap_or_default();
    if found.split('+').next() != Some(LIBTORCH) {
        fail(&format!(
            "{} is libtorch {}, gpipe is built on {LIBTORCH}: unset LIBTORCH and \
             LIBTORCH_USE_PYTORCH and run `make setup`, or point them at {LIBTORCH}",
            torch.display(),
            if found.is_empty() { "of unknown version" } else { found },
        ));
    }
    found.to_owned()
}

/// Aborts the build; cargo shows the message of a panic.
fn fail(message: &str) -> ! {
    eprintln!("gpipe-bridge: {message}");
    std::process::exit(1);
}
