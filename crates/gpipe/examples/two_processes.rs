//! One pipeline in two processes, with one stage in each. Every process runs the same program and
//! makes the same calls. Here the first process starts the second. A program for `torchrun` reads
//! its rank, the number of processes and the store's address from the environment instead.
//!
//! `cargo run --release --example two_processes`
#![allow(clippy::print_stdout)]

use std::{env, net::TcpListener, process::Command, time::Duration};

use gpipe::{
    Adam, MeanSquaredError, Pipeline, Sequence, TensorSpec,
    layers::{Activation, Linear},
};
use gpipe_distributed::{Cluster, Meeting, Store};
use tch::{Device, Kind, Tensor};

const HOST: &str = "127.0.0.1";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    match env::args().nth(1) {
        Some(port) => train(1, Store::At { host: HOST.into(), port: port.parse()? }),
        None => {
            let listener = TcpListener::bind((HOST, 0))?;
            let port = listener.local_addr()?.port().to_string();
            let mut other = Command::new(env::current_exe()?).arg(port).spawn()?;
            let trained = train(0, Store::Serve(listener));
            other.wait()?;
            trained
        }
    }
}

fn train(rank: usize, store: Store) -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Cluster::join(Meeting {
        rank,
        size: 2,
        store,
        name: "two_processes".into(),
        address: HOST.into(),
        timeout: Duration::from_secs(60),
        facts: Vec::new(),
    })?;
    let model =
        Sequence::new().layer(Linear::new(8, 32)).layer(Activation::Tanh).layer(Linear::new(32, 8));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
        .stages(2)
        .micro_batches(4)
        .processes(cluster)
        .loss(MeanSquaredError)
        .optimizer(Adam::default())
        .build()?;
    tch::manual_seed(0);
    let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
    for _ in 0..3 {
        let report = pipeline.train_step(&x, &x)?;
        println!("process {rank}, step {}: loss {:.4}", report.step, report.loss);
    }
    Ok(())
}
