//! Lets this package's binaries, tests and examples find libtorch without LD_LIBRARY_PATH.

fn main() {
    if let Ok(lib) = std::env::var("DEP_GPIPE_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
