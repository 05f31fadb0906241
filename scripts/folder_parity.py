#!/usr/bin/env python3
"""Models' folders to and from Hugging Face's transformers.

Usage: folder_parity.py [--only TEXT]
       (part of .ci/run and make parity; needs the PyTorch of pytorch.py; transformers is fetched
       once)

For each case transformers writes a folder with random weights, in shards, and a tokenizer. Then:

  ids       `gpipe` and transformers encode texts with odd Unicode to the same tokens, and decode
            them to the same text, whole and token by token
  greedy    `gpipe generate FOLDER` in two stages makes the same 64 tokens in float64 as
            transformers, for several prompts at once; and with a repetition penalty
  eval      the same loss of a text, to 1e-10
  back      `gpipe import`, then `gpipe export --to`: every tensor has the same bits and dtype; so
            has `gpipe export FOLDER --to` with other shards
  trained   `gpipe train --from FOLDER` for three steps, `gpipe export --to`: transformers loads the
            folder, and computes the loss that `gpipe eval` computes, to 1e-10

The program prints a table, and ends with exit code 1 at the first difference.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


from llama_parity import ROOT, exact, torch, transformers
from safetensors import safe_open

from tokenizers import (Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

VOCABULARY = 420
SIZES = dict(hidden_size=48, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=128)
GPT2 = dict(n_embd=48, n_layer=3, n_head=4, n_positions=128)
NEW = 64  # tokens

# name: model_type, tokenizer, dtype, keys
CASES = {
    "llama": ("llama", "sentencepiece", "float32", SIZES),
    "llama-3": ("llama", "bytes", "bfloat16", SIZES | dict(
        tie_word_embeddings=True, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32})),
    "mistral": ("mistral", "sentencepiece", "float16", SIZES | dict(sliding_window=9)),
    "qwen2.5": ("qwen2", "bytes", "bfloat16", {key: own for key, own in SIZES.items()
                                               if key != "head_dim"}),
    "qwen3": ("qwen3", "unigram", "bfloat16", SIZES | dict(tie_word_embeddings=True)),
    "mixtral": ("mixtral", "sentencepiece", "bfloat16", SIZES | dict(
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)),
    "qwen3-moe": ("qwen3_moe", "bytes", "bfloat16", SIZES | dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)),
    "gpt2": ("gpt2", "bytes", "float32", GPT2),
}
PROMPTS = ["Dear", "Dear friend", "A pipeline of stages: é漢字", "x"]
TEXTS = ["", " ", "plain text", "  two  blanks\n\n\tand a tab \r\n", "naïve café — 漢字かな交じり文 🦀🦀",
         "e\u0301 is not \u00e9; \ufb01 and \u2460", "\u202eright to left\u202c עברית العربية",
         "zero\u200bwidth\u200d\ufe0f joiners 👩‍👩‍👧", "control \u0007 and \u0000 and \ufffd",
         "<|endoftext|> in the text </s> and <s>", "a" * 300, "１２３ numbers 12,345.678 ½",
         "don't won't I'LL", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff", "line\u2028separator\u0085next"]


def gpipe(*arguments, json_lines=False):
    command = [ROOT / "target" / "debug" / "gpipe", *map(str, arguments)]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"folder_parity: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()] if json_lines else done.stdout


def expect(what, own, other):
    if own != other:
        sys.exit(f"folder_parity: {what} differ:\n  gpipe        {own!r}\n  transformers {other!r}")


def close(what, own, other, tolerance=1e-10):
    apart = abs(own - other) / abs(other)
    if not apart <= tolerance:
        sys.exit(f"folder_parity: {what}: {own!r} and {other!r} differ by {apart:.1e}, allowed "
                 f"is {tolerance:.0e}")
    return apart


def text_of_ours():
    return "".join((ROOT / name).read_text() for name in ("README.md", "ARCHITECTURE.md"))


def tokenizer(kind):
    """A tokenizer that is learned here, built like that of GPT-2 and Qwen, Llama 2, or T5."""
    lines = text_of_ours().splitlines(True)
    end = "</s>" if kind != "bytes" else "<|endoftext|>"
    if kind == "bytes":
        own = Tokenizer(models.BPE())
        own.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        own.normalizer = normalizers.NFC()
        own.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False,
                                      special_tokens=[end, "<|im_start|>"],
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "sentencepiece":
        own = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"),
                                               normalizers.Replace(" ", "▁")])
        own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                         decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        trainer = trainers.BpeTrainer(
            vocab_size=400, show_progress=False,
            special_tokens=["<unk>", "<s>", end] + [f"<0x{byte:02X}>" for byte in range(256)])
    else:
        own = Tokenizer(models.Unigram())
        own.normalizer = normalizers.NFKC()
        own.pre_tokenizer = pre_tokenizers.Metaspace()
        own.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=400, show_progress=False, unk_token="<unk>",
                                          special_tokens=["<unk>", end, "<s>"])
    own.train_from_iterator(lines, trainer)
    if kind == "sentencepiece":
        own.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", own.token_to_id("<s>"))])
    # An added token that is no special one, as Qwen has <think>.
    own.add_tokens(["<think>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token=end,
                                                clean_up_tokenization_spaces=False)


def make(case, folder):
    kind, tokens, dtype, keys = CASES[case]
    fast = tokenizer(tokens)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, initializer_range=0.2, eos_token_id=fast.eos_token_id,
        bos_token_id=None, **keys)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, own in model.named_parameters():
            if "norm" in name or "ln_" in name or "bias" in name:  # made as ones and zeros
                own.add_(torch.randn_like(own), alpha=0.3)
        # Untrained models repeat the last token if the head is the table: let them go on.
        if config.tie_word_embeddings:
            model.get_input_embeddings().weight.mul_(0.3)
    model.generation_config.eos_token_id = None  # 64 tokens, whatever they are
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size="60KB")
    fast.save_pretrained(folder)
    return fast


def load(folder):
    """The folder's model as transformers loads it, in float64, with parts that do not round to
    float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    exact(model)
    return model


def check_ids(folder, fast):
    done = subprocess.run([ROOT / "target" / "debug" / "token_ids", folder], check=True, text=True,
                          input=json.dumps(TEXTS), capture_output=True)
    for text, (own, decoded, streamed) in zip(TEXTS, json.loads(done.stdout), strict=True):
        expect(f"tokens of {text!r}", own, fast(text).input_ids)
        expect(f"text of {text!r}", decoded, fast.decode(own, skip_special_tokens=True))
        expect(f"streamed text of {text!r}", streamed, decoded)
    return len(TEXTS)


def check_greedy(folder, fast, model):
    given = PROMPTS
    if model.config.model_type != "gpt2":  # which has no more positions
        given = [*PROMPTS, "a long prompt of many words " * 40]
    prompts = [part for prompt in given for part in ("--prompt", prompt)]
    for penalty in (1.0, 1.3):
        found = gpipe("generate", folder, *prompts, "--temperature", 0, "--tokens", NEW, "--dtype",
                      "float64", "--stages", 2, "--json", "--repetition-penalty", penalty,
                      json_lines=True)
        for prompt, own in zip(given, found, strict=True):
            ids = torch.tensor([fast(prompt).input_ids])
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                    max_new_tokens=NEW, repetition_penalty=penalty,
                                    eos_token_id=fast.eos_token_id, pad_token_id=0)
            theirs = theirs[0, ids.shape[1]:].tolist()
            if theirs[-1] == fast.eos_token_id:
                theirs.pop()
            expect(f"tokens after {prompt!r}, penalty {penalty}", own["tokens"], theirs)
    return NEW


def loss_of(folder, fast, text, length):
    """The mean loss of all tokens but the first, in windows as `gpipe eval` takes them."""
    model, tokens = load(folder), fast(text).input_ids
    if not tokens or tokens[-1] != fast.eos_token_id:
        tokens.append(fast.eos_token_id)
    tokens, total = torch.tensor(tokens), 0.0
    with torch.no_grad():
        for first in range(0, len(tokens) - 1, length):
            window = tokens[first:first + length + 1]
            logits = model(window[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


def check_eval(source, folder, fast, text):
    found = gpipe("eval", source, "--text", text, "--json", "--dtype", "float64", "--stages", 2,
                  "--set", "data.sequence=32", json_lines=True)[0]
    return close(f"loss of {source.name}", found["loss"],
                 loss_of(folder, fast, text.read_text(), 32))


def tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            expect(f"format of {path.name}", file.metadata()["format"], "pt")
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def check_same(folder, other):
    theirs, ours = tensors(folder), tensors(other)
    expect("names", sorted(ours), sorted(theirs))
    for name, own in ours.items():
        expect(f"dtype of {name}", own.dtype, theirs[name].dtype)
        if not torch.equal(own.view(torch.uint8), theirs[name].view(torch.uint8)):
            sys.exit(f"folder_parity: {name} differs after its way there and back")
    return len(ours)


def check(case, aside):
    folder, text = aside / "model", aside / "text.txt"
    text.write_text(text_of_ours()[:3000])
    fast = make(case, folder)
    ids = check_ids(folder, fast)
    greedy = check_greedy(folder, fast, load(folder))
    evaluated = check_eval(folder, folder, fast, text)
    gpipe("import", folder, "--out", aside / "imported" / "weights.safetensors")
    gpipe("export", aside / "imported", "--to", aside / "back", "--shard-size", "50KiB")
    same = check_same(folder, aside / "back")
    gpipe("export", folder, "--to", aside / "again")
    check_same(folder, aside / "again")
    gpipe("train", "--from", folder, "--text", text, "--stages", 2, "--steps", 3, "--out",
          aside / "run", "--set", "data.sequence=32", "--set", "optimizer.lr=0.001")
    gpipe("export", aside / "run", "--to", aside / "mine", "--dtype", "float32")
    trained = check_eval(aside / "run", aside / "mine", fast, text)
    return f"{ids:8} {greedy:8} {evaluated:10.1e} {same:8} {trained:10.1e}"


def main():
    parser = argparse.ArgumentParser(description="Compares gpipe with transformers.")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for package, binary in (("gpipe-cli", "gpipe"), ("gpipe-drivers", "token_ids")):
        subprocess.run(["cargo", "build", "--quiet", "--locked", "--package", package, "--bin",
                        binary], cwd=ROOT, check=True)
    print(f"{'case':12} {'ids':>8} {'greedy':>8} {'eval':>10} {'back':>8} {'trained':>10} "
          f"{'s':>6}", flush=True)
    names = [name for name in CASES if options.only in name]
    for name in names:
        begin = time.time()
        with tempfile.TemporaryDirectory() as aside:
            line = check(name, Path(aside))
        print(f"{name:12} {line} {time.time() - begin:6.1f}", flush=True)
    print(f"\nfolders of transformers {transformers.__version__}: {len(names)} models, there and "
          "back")


if __name__ == "__main__":
    main()
