//! Lets the library find PyTorch beside itself, in whichever environment it is installed.

fn main() {
    // site-packages/gpipe/_gpipe.so and site-packages/torch/lib. Python imports torch first anyway,
    // so this is for tools that load the library alone.
    println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../torch/lib");
}
