//! Lets this package's tests and examples find libtorch without LD_LIBRARY_PATH, and tells crates
//! that use it where it is.

fn main() {
    if let Ok(lib) = std::env::var("DEP_GPIPE_BRIDGE_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
        println!("cargo:libtorch_lib={lib}");
    }
}
