//! Folders of coloured shapes, and networks small enough to learn them in a second.

use std::{fs, path::Path};

use gpipe_core::splitmix::{Stream, key};
use image::{Rgb, RgbImage};

use super::Folder;

/// The classes, in order. A colour tells them apart, and so does a shape.
pub const SHAPES: [&str; 3] = ["cross", "disc", "square"];

/// A small ResNet on the images of `train`, validated on those of `held-out`.
pub const RESNET: &str = r#"
[model]
kind = "resnet"
blocks = [1, 1, 1, 1]
width = 4

[data]
kind = "image-folder"
folder = "train"
validation = "held-out"

[images]
size = 32
mean = [0.5, 0.5, 0.5]
std = [0.5, 0.5, 0.5]

[pipeline]
stages = 2
micro_batches = 2

[optimizer]
lr = 1e-2
warmup_steps = 5

[train]
steps = 30
mini_batch = 12
"#;

/// What it says of its network.
pub const NETWORK: &str = "kind = \"resnet\"\nblocks = [1, 1, 1, 1]\nwidth = 4\n";
/// An AmoebaNet-D, with all that its recipe has.
const AMOEBANET: &str =
    "kind = \"amoebanet\"\ncells = 3\nfilters = 8\ndrop_path = 0.1\nauxiliary = 0.4\n";

/// A folder with 12 images of each class to train on, 4 to validate on, and the configurations
/// resnet.toml and amoebanet.toml.
pub fn with_images() -> Folder {
    let folder = Folder::new();
    shapes(&folder.path("train"), &SHAPES, 12);
    shapes(&folder.path("held-out"), &SHAPES, 4);
    fs::write(folder.path("resnet.toml"), RESNET).unwrap();
    fs::write(folder.path("amoebanet.toml"), RESNET.replace(NETWORK, AMOEBANET)).unwrap();
    folder
}

/// Draws `count` images of each of `classes`, PNG and JPEG in turn: `root/CLASS/NUMBER.png`. Other
/// roots have other images.
pub fn shapes(root: &Path, classes: &[&str], count: usize) {
    let name = root.file_name().unwrap().as_encoded_bytes();
    let name = name.iter().fold(0, |all, &byte| key(&[all, byte.into()]));
    for class in classes {
        let shape = SHAPES.iter().position(|shape| shape == class).unwrap();
        fs::create_dir_all(root.join(class)).unwrap();
        for number in 0..count {
            let stream = Stream::new(key(&[name, shape as u64, number as u64]));
            let end = ["png", "jpg"][number % 2];
            drawn(shape, stream).save(root.join(class).join(format!("{number:02}.{end}"))).unwrap();
        }
    }
}

/// A shape somewhere on a dark ground; few of the images are square.
fn drawn(shape: usize, mut stream: Stream) -> RgbImage {
    let mut between = |least: usize, most: usize| (least + stream.below(most - least + 1)) as i64;
    let (width, height) = (between(32, 40), between(32, 40));
    let (x, y, radius) = (between(12, 20), between(12, 20), between(6, 10));
    let ground = Rgb([between(0, 60) as u8; 3]);
    let mut colour = Rgb([60; 3]);
    colour.0[shape] = 200;
    RgbImage::from_fn(width as u32, height as u32, |column, row| {
        let (dx, dy) = ((i64::from(column) - x).abs(), (i64::from(row) - y).abs());
        let inside = match SHAPES[shape] {
            "cross" => dx.min(dy) <= 2 && dx.max(dy) <= radius,
            "disc" => dx * dx + dy * dy <= radius * radius,
            _ => dx.max(dy) <= radius,
        };
        if inside { colour } else { ground }
    })
}
