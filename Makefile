# `make train` and `make test` do all the set-up on a fresh machine.
CARGO ?= cargo
export CARGO_TERM_COLOR ?= auto
PREFIX ?= $(HOME)/.local

.PHONY: help setup build install train test simulated-gpu soak fuzz bench bench-full bench-memory bench-checkpoint bench-generation bench-tuning bench-prediction bench-processes bench-schedules bench-plans bench-ledger bench-python bench-bilingual parity elastic slurm python test-python book fonts catalogues

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

setup: ## Put the pinned libtorch in place (GPIPE_LIBTORCH=cuda for the CUDA set)
	@python3 scripts/setup.py

build: setup ## Build the gpipe command
	$(CARGO) build --release --locked --package gpipe-cli

install: build ## Put the gpipe command into PREFIX/bin [PREFIX=~/.local]; it finds its libtorch
	install -D target/release/gpipe $(PREFIX)/bin/gpipe
	$(PREFIX)/bin/gpipe --version

train: build ## Train a small transformer on real text with two stages
	$(CARGO) fetch --locked --manifest-path configs/text/Cargo.toml
	./target/release/gpipe train configs/small.toml $(ARGS)

test: setup ## All checks and tests (an hour on two cores)
	$(CARGO) xtask ci

simulated-gpu: setup ## All suites on simulated GPUs, whose every wait is checked, and the library for gpipe (three quarters of an hour on two cores)
	$(CARGO) build --release --locked --package gpipe-simulated-gpu
	$(CARGO) xtask simulated-gpu

soak: setup ## The long proofs: kills, faults, endurance, interleavings, fuzzing (an hour at most)
	$(CARGO) xtask soak

fuzz: setup ## Fuzz every reader, guided by coverage (an hour of fuzzing: half of one on two cores)
	$(CARGO) xtask fuzz

bench: setup ## gpipe beside PyTorch, plain and pipelined, and the paper's tables: the short version, into out/benchmarks (fetches PyTorch once; 15 to 30 minutes on two cores)
	python3 benchmarks/bench.py $(ARGS)

bench-full: setup ## ... with every configuration, into benchmarks/results (three hours on two cores)
	python3 benchmarks/bench.py --full $(ARGS)

bench-checkpoint: build ## What a checkpoint every 50 steps costs the gpt step (half an hour on two cores)
	python3 benchmarks/checkpoint.py $(ARGS)

bench-generation: build ## Tokens a second of gpipe generate beside transformers' (fetches both once; 20 minutes on two cores)
	python3 benchmarks/generation.py $(ARGS)

bench-tuning: build ## Fine-tuning of Qwen3-0.6B's shape beside transformers and PEFT (fetches both once; 20 GB of memory, half an hour on two cores)
	python3 benchmarks/tuning.py $(ARGS)

bench-memory: setup ## The largest AmoebaNet-D and transformer under a cap, every variant (three quarters of an hour on two cores)
	python3 benchmarks/memory.py --network amoeba --all-variants
	python3 benchmarks/memory.py --network transformer --all-variants

bench-prediction: build ## Predicted against measured steps and bytes, of two workloads (an hour and a half on two cores; make fonts first)
	python3 benchmarks/prediction.py --in-turn --workload amoeba
	python3 benchmarks/prediction.py --in-turn --workload gpt
	python3 benchmarks/prediction.py --workload gpt
	python3 benchmarks/prediction.py --workload amoeba

bench-processes: setup ## The gpt step in two processes beside two threads and PyTorch's over Gloo (fetches PyTorch once; 15 minutes on two cores)
	python3 benchmarks/processes.py --in-turn
	python3 benchmarks/processes.py $(ARGS)

bench-schedules: setup ## Every schedule in turn, what was predicted of it, and more devices simulated (half an hour on two cores)
	python3 benchmarks/schedules.py --workload gpt $(ARGS)
	python3 benchmarks/schedules.py --workload amoeba $(ARGS)

bench-plans: build ## What gpipe plan chooses beside every other way, of four networks (fetches PyTorch once; an hour on two cores; make fonts first)
	python3 benchmarks/plans.py --workload gpt $(ARGS)
	python3 benchmarks/plans.py --workload amoeba $(ARGS)
	python3 benchmarks/plans.py --workload llama $(ARGS)
	python3 benchmarks/plans.py --workload words $(ARGS)

bench-ledger: build ## Where the time of a step goes, of three networks in two dtypes (half an hour on two cores; make fonts first)
	python3 benchmarks/ledger.py $(ARGS)

bench-python: setup ## The Python package beside the native engine and PyTorch's pipelines (half an hour on two cores)
	python3 benchmarks/python_package.py $(ARGS)

bench-bilingual: build ## One model of many languages beside models of one each (two hours on two cores; make catalogues first)
	python3 benchmarks/bilingual.py

python: ## Build the Python package into python/env (fetches PyTorch once, 3 GB; 7 minutes on two cores; needs python3-venv, python3-dev; ARGS=--simulated-gpus)
	@python3 scripts/python.py $(ARGS)

test-python: ## All tests of the Python package: the whole zoo at every K, schedule and policy (half an hour on two cores)
	@python3 scripts/python.py --tests
	cd python && GPIPE_ZOO=full env/bin/pytest $(ARGS)

parity: setup ## Compare losses, gradients, parameters and exchanged weights with PyTorch's and transformers', fine-tuning with PEFT's, BLEU and chrF with sacreBLEU's
	path=$$(python3 scripts/pytorch.py --torchvision) && export PYTHONPATH="$$path" && \
		python3 scripts/parity.py $(ARGS) && python3 scripts/schedule_parity.py && \
		python3 scripts/image_parity.py && \
		python3 scripts/translation_parity.py && python3 scripts/llama_parity.py && \
		python3 scripts/folder_parity.py && python3 scripts/tuning_parity.py && \
		python3 scripts/interchange.py
	python3 scripts/score_parity.py

elastic: build ## torchrun's elastic launcher loses a host and gains it back (network namespaces; fetches PyTorch once; five minutes on two cores)
	PYTHONPATH=$$(python3 scripts/pytorch.py) python3 scripts/elastic.py

slurm: build ## The documented script under Slurm, with a daemon on this machine (apt install slurm-wlm; a minute)
	python3 scripts/slurm.py

book: ## Build the book in docs/ into target/book, and refuse dead links (builds mdBook once)
	python3 scripts/book.py

fonts: ## Make images of letters and digits, data/letters and data/digits, from free fonts (Debian and Ubuntu; no root)
	@python3 scripts/prepare/fonts.py $(ARGS)

catalogues: ## Make pairs of sentences and their English translations, data/translations, from messages of free programs (Debian and Ubuntu; no root)
	@python3 scripts/prepare/catalogues.py $(ARGS)
