//! Compiles the simulator to `simulated-gpu/libtorch_cuda.so`, in the folder of the programs that
//! are built with it.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

fn main() {
    println!("cargo:rerun-if-changed=cpp");
    let Ok(lib) = std::env::var("DEP_GPIPE_BRIDGE_LIBTORCH_LIB") else { return };
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    // Clippy links nothing, and shares nothing with a build.
    let is_clippy = std::env::var("RUSTC_WORKSPACE_WRAPPER")
        .is_ok_and(|wrapper| Path::new(&wrapper).ends_with("clippy-driver"));
    if !is_clippy {
        build(Path::new(&lib));
    }
}

fn build(lib: &Path) {
    let torch = lib.parent().map(Path::to_path_buf).unwrap_or_default();
    let mut compiler = cc::Build::new();
    compiler
        .cpp(true)
        .std("c++17")
        .files(
            // The first one silences warnings about what the others replace.
            [
                "quiet",
                "call",
                "group",
                "hooks",
                "interface",
                "kernels",
                "memory",
                "operators",
                "order",
                "pinned",
            ]
            .map(source),
        )
        // The last one finds the kernels of all others.
        .files(["settings", "streams", "takeover"].map(source))
        .includes([torch.join("include"), torch.join("include/torch/csrc/api/include")])
        .flag("-D_GLIBCXX_USE_CXX11_ABI=1")
        .flag_if_supported("-Wno-unused-parameter")
        .flag_if_supported("-Wno-sign-compare")
        .opt_level(1)
        .debug(false)
        .pic(true);
    let objects = compiler.compile_intermediates();

    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    // target/PROFILE/build/PACKAGE/out
    let programs = out.ancestors().nth(3).unwrap_or(&out);
    let folder = programs.join("simulated-gpu");
    let library = folder.join("libtorch_cuda.so");
    std::fs::create_dir_all(&folder).unwrap_or_else(|error| fail(&error.to_string()));
    let mut link: Command = compiler.get_compiler().to_command();
    let link = link
        .arg("-shared")
        .args(objects)
        .arg(format!("-L{}", lib.display()))
        .args(["-ltorch_cpu", "-lc10", "-Wl,--no-undefined"])
        .arg("-o")
        .arg(&library);
    match link.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("the linker ended with {status}")),
        Err(error) => fail(&format!("cannot start the linker: {error}")),
    }
}

fn source(name: &str) -> PathBuf {
    Path::new("cpp").join(name).with_extension("cc")
}

/// Ends the build; cargo shows the message.
fn fail(message: &str) -> ! {
    eprintln!("gpipe-simulated-gpu: {message}");
    std::process::exit(1);
}
