#!/usr/bin/env python3
"""Compares gpipe's Llama family and GPT-2 with Hugging Face's transformers: logits, loss, every
gradient of the first step, and parameters after five steps of AdamW, from random weights.

Usage: llama_parity.py [--only TEXT] [--short] [--prove]
       (make parity; needs the PyTorch of pytorch.py; transformers is fetched once)

The cases cover the supported architectures, rotary scalings, windows, biases, ties and experts.
Each is trained by the driver `llama_parity` on several stages with three micro-batches, and here
with the same ones. The program prints a table. Where a tensor differs, it prints the name and ends
with exit code 1.

The balance of experts depends on the micro-batches, so transformers gets the same ones. Its experts
of one layer are one parameter in memory, and one each in files and here.

transformers computes RMSNorm in float32 even in float64. There a value next to the middle of two
float32 numbers may be rounded differently. So in float64 its norms are replaced by ones that do not
round, and so are the probabilities of experts; nothing else is.

--only TEXT  cases whose name has TEXT in it
--short      five cases (CI)
--prove      show that each of some deliberate faults is found
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import packages

sys.path.insert(0, str(packages.transformers()))

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from parity import ROOT, Findings, distances, read_safetensors  # noqa: E402

SIZES = dict(vocab_size=101, hidden_size=48, intermediate_size=88, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=64,
             attention_dropout=0.0, initializer_range=0.2)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0,
        "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 0.5}

MOE = dict(num_experts_per_tok=2, head_dim=12)
GPT2 = dict(n_embd=48, n_layer=3, n_head=6, n_positions=64, embd_pdrop=0.0, resid_pdrop=0.0,
            attn_pdrop=0.0)

# name: model_type, keys, stages, schedule, length of a sample
CASES = {
    "llama2": ("llama", dict(num_key_value_heads=6, pad_token_id=-1), 2, "1f1b", 23),
    "llama3.1": ("llama", dict(rope_parameters=LLAMA3, head_dim=10, tie_word_embeddings=True), 3,
                 "zb-h1", 37),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3,
                                   rope_parameters={"rope_type": "linear", "factor": 2.5,
                                                    "rope_theta": 1e4}), 2, "gpipe", 19),
    "llama-dynamic": ("llama", dict(max_position_embeddings=16,
                                    rope_parameters={"rope_type": "dynamic", "factor": 3.0,
                                                     "rope_theta": 1e4}), 2, "1f1b", 41),
    "mistral": ("mistral", dict(sliding_window=7, head_dim=16, pad_token_id=5), 2,
                "interleaved:2", 29),
    "mistral-all": ("mistral", dict(sliding_window=None, hidden_size=60), 2, "1f1b", 13),
    "qwen2.5": ("qwen2", dict(tie_word_embeddings=True, rope_parameters={
        "rope_type": "default", "rope_theta": 1e6}), 3, "1f1b", 23),
    "qwen2-window": ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
                     2, "zb-h1", 23),
    "qwen3": ("qwen3", dict(head_dim=20, num_attention_heads=4, tie_word_embeddings=True), 2,
              "1f1b", 31),
    "qwen3-yarn": ("qwen3", dict(head_dim=16, attention_bias=True, rope_parameters=YARN), 3,
                   "zb-h1", 61),
    "qwen3-yarn-scales": ("qwen3", dict(head_dim=16, rope_parameters=YARN | {
        "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}), 2, "1f1b", 33),
    "qwen3-types": ("qwen3", dict(head_dim=12, use_sliding_window=True, sliding_window=4,
                                  layer_types=["sliding_attention", "full_attention",
                                               "sliding_attention"]), 3, "1f1b", 17),
    "mixtral": ("mixtral", MOE | dict(num_local_experts=5, sliding_window=8), 3, "1f1b", 23),
    "mixtral-balanced": ("mixtral", MOE | dict(num_local_experts=4, output_router_logits=True,
                                               router_aux_loss_coef=0.4), 2, "zb-h1", 19),
    "qwen3-moe": ("qwen3_moe", MOE | dict(num_experts=6, moe_intermediate_size=24, head_dim=12,
                                          norm_topk_prob=True, output_router_logits=True,
                                          router_aux_loss_coef=0.3, mlp_only_layers=[1]), 3,
                  "gpipe", 17),
    "qwen3-moe-step": ("qwen3_moe", MOE | dict(num_experts=4, moe_intermediate_size=24,
                                               decoder_sparse_step=2, attention_bias=True,
                                               use_sliding_window=True, sliding_window=6), 2,
                       "1f1b", 21),
    "gpt2": ("gpt2", GPT2, 3, "1f1b", 23),
    "gpt2-untied": ("gpt2", GPT2 | dict(tie_word_embeddings=False, activation_function="gelu",
                                        n_inner=80), 2, "zb-h1", 19),
}
SHORT = ["llama3.1", "mistral", "qwen3-yarn", "qwen3-moe", "gpt2"]
SAMPLES, MICRO_BATCHES = 7, (3, 2, 2)
STEPS = 5
COLUMNS = ["logits", "loss", "gradient", "parameters"]
# Of logits relative to the largest; of the others as parity.py's. Five steps of AdamW divide by the
# root of small squares, which enlarges roundings.
TOLERANCE = {"float64": dict(logits=1e-10, loss=1e-10, gradient=1e-10, parameters=1e-9),
             "float32": dict(logits=1e-5, loss=1e-6, gradient=2e-5, parameters=1e-4)}


class ExactNorm(nn.Module):
    """RMSNorm in the dtype of its input."""

    def __init__(self, own):
        super().__init__()
        self.weight, self.eps = own.weight, own.variance_epsilon

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def exact_norms(module):
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, ExactNorm(child))
        else:
            exact_norms(child)


def exact_router(router, x):
    logits = nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
    weights, chosen = logits.softmax(-1).topk(router.top_k, dim=-1)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def routers(model):
    return [own for own in model.modules() if type(own).__name__.endswith("TopKRouter")]


def exact(model):
    """Lets nothing round to float32, and computes experts one by one: the grouped product has no
    float64."""
    exact_norms(model)
    model.config._experts_implementation = "eager"
    for router in routers(model):
        router.forward = functools.partial(exact_router, router)


def balance(logits, experts, top_k):
    """transformers' load_balancing_loss_func, in the dtype of the logits."""
    probabilities = torch.cat(logits).softmax(-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    counts = nn.functional.one_hot(chosen, experts).sum((0, 1)).to(probabilities.dtype)
    return experts * (counts / len(chosen) * probabilities.mean(0)).sum()


def split_experts(tensors, kind):
    """Each expert's tensors, with the names that they have in files."""
    found = {}
    for name, own in tensors.items():
        layer, _, last = name.rpartition(".mlp.experts.")
        names = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
                 "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj")}.get(kind)
        if last == "gate_up_proj":
            for expert, both in enumerate(own):
                for part, name in zip(both.chunk(2), names[1:3]):
                    found[f"{layer}.{names[0]}.experts.{expert}.{name}.weight"] = part
        elif last == "down_proj" and layer:
            for expert, part in enumerate(own):
                found[f"{layer}.{names[0]}.experts.{expert}.{names[3]}.weight"] = part
        else:
            found[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if kind == "mixtral"
                  else name] = own
    return found


def make(case, folder):
    """Writes the folder of a model with random weights, and returns the model and its data."""
    kind, keys, _, _, length = CASES[case]
    sizes = SIZES if kind != "gpt2" else {key: SIZES[key] for key in ("vocab_size",
                                                                      "initializer_range")}
    config = transformers.AutoConfig.for_model(kind, **sizes | keys)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for name, own in model.named_parameters():
            if "norm" in name or "ln_" in name or "bias" in name:  # made as ones and zeros
                own.add_(torch.randn_like(own), alpha=0.3)
    model.save_pretrained(folder)
    data = {"tokens": torch.randint(SIZES["vocab_size"], (SAMPLES, length)),
            "targets": torch.randint(SIZES["vocab_size"], (SAMPLES, length))}
    data["targets"][1, 3:8] = -100
    save_file(data, folder / "data.safetensors")
    return model, data


def train(model, data):
    """What the driver writes, by PyTorch."""
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    found = {}
    recorded = []
    for router in routers(model):
        router.register_forward_hook(lambda *arguments: recorded.append(arguments[2][0]))
    config = model.config
    balanced = getattr(config, "output_router_logits", False)
    for step in range(1, STEPS + 1):
        if step == 1:
            found["logits"] = model(data["tokens"]).logits.detach().double()
        optimizer.zero_grad()
        total, targets = 0.0, (data["targets"] != -100).sum()
        for tokens, wanted in zip(*(data[name].split(MICRO_BATCHES)
                                    for name in ("tokens", "targets")), strict=True):
            recorded.clear()
            logits = model(tokens).logits
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(),
                                               reduction="sum") / targets
            if balanced:
                term = balance(recorded, recorded[0].shape[-1], config.num_experts_per_tok)
                loss = loss + config.router_aux_loss_coef * term * (wanted != -100).sum() / targets
            loss.backward()
            total += loss.detach().double()
        found[f"{step}/loss"] = total
        if step == 1:
            found["gradient"] = split_experts({name: own.grad.double().clone()
                                       for name, own in model.named_parameters()},
                                      config.model_type)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found["parameters"] = split_experts({name: own.detach().double()
                                 for name, own in model.named_parameters()}, config.model_type)
    return found


def below(file, prefix):
    return {name.removeprefix(prefix): own.double() for name, own in file.items()
            if name.startswith(prefix)}


def determined(tensors):
    """Without GPT-2's biases of keys. The softmax does not change with them, so their gradients are
    roundings, which AdamW divides by their own size."""
    return {name: own if not name.endswith("c_attn.bias") else torch.cat(
        [own.chunk(3)[0], own.chunk(3)[2]]) for name, own in tensors.items()}


def decided(own, other, gradients):
    """Our parameters, with theirs where the sign of the first gradient is that of a rounding: below
    a hundred-thousandth of the largest, but not 0. AdamW divides a gradient by its own size, so
    such a sign decides about a whole step of the learning rate."""
    found = {}
    for name, values in own.items():
        gradient = gradients[name].abs() if name in gradients else torch.ones(1)
        unsure = (gradient > 0) & (gradient < 1e-5 * gradient.max())
        found[name] = torch.where(unsure, other[name].to(values.dtype), values)
    return found


def compare(case, dtype, driver, spoil=None):
    with tempfile.TemporaryDirectory() as aside:
        folder = Path(aside)
        model, data = make(case, folder)
        if spoil:
            spoil(folder)
        _, _, stages, schedule, _ = CASES[case]
        subprocess.run([driver, folder, dtype, str(stages), schedule], check=True)
        ours = read_safetensors(folder / "gpipe.safetensors")
    if dtype == "float64":
        exact(model)
    theirs = train(model.to(getattr(torch, dtype)), data)
    found, tolerance = Findings(f"{case} {dtype}"), TOLERANCE[dtype]
    apart = (ours["logits"].double() - theirs["logits"]).abs().max() / theirs["logits"].abs().max()
    found.add("logits", "logits", 0, apart.item(), tolerance["logits"])
    for step in range(1, STEPS + 1):
        own, other = ours[f"{step}/loss"].item(), theirs[f"{step}/loss"].item()
        # Later losses are of parameters that have drifted apart.
        allowed = tolerance["loss"] if step == 1 else tolerance["parameters"]
        found.add("loss", "loss", step, abs(own - other) / abs(other), allowed)
    for column, prefix in (("gradient", "1/gradient/"), ("parameters", f"{STEPS}/parameter/")):
        own = below(ours, prefix)
        if (column, dtype) == ("parameters", "float32"):
            own = decided(own, theirs[column], theirs["gradient"])
        for name, _, norm in distances(determined(own), determined(theirs[column])):
            found.add(column, name, prefix.split("/")[0], norm, tolerance[column])
    return found


def edit(change):
    def spoil(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))
    return spoil


FAULTS = {
    "another eps": ("llama2", edit(lambda c: c.update(rms_norm_eps=1e-5))),
    "a window that is one too wide": ("mistral", edit(lambda c: c.update(sliding_window=8))),
    "another theta": ("qwen3", edit(lambda c: c["rope_parameters"].update(rope_theta=10001.0))),
    "another blend": ("qwen3-yarn", edit(lambda c: c["rope_parameters"].update(beta_slow=1.0))),
    "another balance of experts": ("mixtral-balanced",
                                   edit(lambda c: c.update(router_aux_loss_coef=0.41))),
    "weights that are not divided": ("qwen3-moe", edit(lambda c: c.update(norm_topk_prob=False))),
    "the window in the wrong blocks": ("qwen3-types", edit(
        lambda c: c["layer_types"].append(c["layer_types"].pop(0)))),
}


def prove(driver):
    passed = True
    for fault, (case, spoil) in FAULTS.items():
        found = compare(case, "float64", driver, spoil)
        print(f"{fault}: {'found' if found.wrong else 'NOT FOUND'}")
        passed &= bool(found.wrong)
    return passed


def main():
    parser = argparse.ArgumentParser(description="Compares gpipe with transformers.")
    parser.add_argument("--only", default="")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--prove", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    subprocess.run(["cargo", "build", "--quiet", "--locked", "--package", "gpipe-drivers", "--bin",
                    "llama_parity"], cwd=ROOT, check=True)
    driver = ROOT / "target" / "debug" / "llama_parity"
    if options.prove:
        sys.exit(0 if prove(driver) else 1)
    names = [name for name in (SHORT if options.short else CASES) if options.only in name]
    findings = [compare(name, dtype, driver) for name in names for dtype in ("float64", "float32")]
    print("worst difference over its tolerance\n")
    print(f"{'case':28}" + "".join(f"{column:>12}" for column in COLUMNS))
    for found in findings:
        print(f"{found.case:28}" + "".join(f"{found.worst[column][0]:12.3f}"
                                           for column in COLUMNS))
    wrong = sorted((wrong for found in findings for wrong in found.wrong), reverse=True)
    if wrong:
        for _, text in wrong[:10]:
            print(text)
        sys.exit(f"\nllama_parity: {len(wrong)} comparisons beyond their tolerance")
    print(f"\nparity with transformers {transformers.__version__}: {len(names)} models")


if __name__ == "__main__":
    main()
