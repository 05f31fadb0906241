#!/usr/bin/env python3
"""Compares fine-tuning with Hugging Face's transformers and PEFT.

Usage: tuning_parity.py [--only TEXT]
       (part of make parity; needs the PyTorch of pytorch.py; transformers and PEFT are fetched
       once)

Chats. For each template, in the style of a known family, and each kind of tokenizer:

  texts     `gpipe` and transformers render each conversation as the same text, with and without the
            generation prompt, or refuse the conversation for the same reason
  tokens    the text has the same tokens
  learned   the loss masks are equal. A token is in the loss if its first character is in an answer.
            An answer lasts from the end of its generation prompt to the end of its turn. If the
            template has {% generation %}, the mask also equals that of transformers
  refused   the number of conversations that the template refuses

Texts and prompts with completions, which need no template, are compared in the same way.

Adapters. transformers writes a folder with random weights. `gpipe train --from` trains adapters in
two stages and float64, and packs samples into rows in models of the Llama family. PEFT trains the
adapters with one sample per row. Both start from the adapter that `gpipe export --adapter` writes:

  loss        the losses of the first two steps
  gradient    the gradients of two steps of SGD; in the first step, only that of B is not 0
  parameters  the parameters after five steps of AdamW, and the losses of these steps
  adapter     the held-out loss of PEFT with the exported adapter, and that of `gpipe eval`
  merged      the held-out loss of transformers with the exported folder, in float64 and float32

Differences are relative. Those of parameters and gradients are relative to the norm of the tensor,
or to a thousandth of the norm of all tensors if that is larger. The program prints tables, and ends
with exit code 1 at the first difference beyond its tolerance.
"""

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import packages
from llama_parity import ROOT, TOLERANCE, edit, torch, transformers
from parity import distances

sys.path.insert(0, str(packages.peft()))

import peft  # noqa: E402
from folder_parity import gpipe, load, make, tokenizer  # noqa: E402
from jinja2.exceptions import TemplateError  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

IGNORE = -100

CHATML = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe of help.<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(asked=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set state.asked = state.asked + 1 %}
{%- endfor %}
{%- set state.seen = -1 %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {%- set state.seen = state.seen + (1 if message.role == 'user' else 0) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set parts = message.content.split('</think>') %}
        {%- set answer = parts[-1].lstrip('\\n') %}
        {%- set thoughts = '' %}
        {%- if '</think>' in message.content %}
            {%- set thoughts = parts[0].split('<think>')[-1].strip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if state.seen == state.asked and loop.last %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- answer + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
BRACKETS = """\
{% if messages[0]['role'] == 'system' %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}
{% set system = '' %}
{% set turns = messages %}
{% endif %}
{% for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Turns must alternate: user, assistant, user, ...') }}
{% endif %}
{% if message['role'] == 'user' %}
{% set asked = system + message['content'] if loop.first else message['content'] %}
{{- bos_token + '[INST] ' + asked.strip() + ' [/INST]' -}}
{% elif message['role'] == 'assistant' %}
{{- ' ' + message['content'] | trim + ' ' + eos_token -}}
{% endif %}
{% endfor %}
"""
HEADERS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
    {{- head + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LINES = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""
GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- generation %}
            {{- message.content.strip() + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|' + message.role + '|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
TOOLS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}
                {{- call.arguments }}
            {%- else %}
                {{- call.arguments | tojson(ensure_ascii=False) }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '\\n' + message.tool_calls | tojson(indent=2) }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
# name: template, end of a turn
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>\n"),
    "brackets": (BRACKETS, " </s>"),
    "headers": (HEADERS, "<|eot_id|>"),
    "lines": (LINES, "</s>\n"),
    "generation": (GENERATION, "<|im_end|>"),
    "tools": (TOOLS, "<|im_end|>\n"),
}
KINDS = ("bytes", "sentencepiece", "unigram")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<|user|>", "<|assistant|>"]


def turns(*contents, system=None):
    """A conversation in which the user speaks first."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[number % 2], "content": content}
                       for number, content in enumerate(contents)]


CALL = {"name": "find", "arguments": {
    "query": "<café> & \"naïve\" \\ 漢字\n\u0001\u007f", "limit": 3, "exact": True, "near": None,
    "share": 0.25, "whole": 2.0, "large": 1e20, "parts": [[], {}, [1, -2]]}}
SAID = {"type": "function", "id": "7", "function": {"name": "say", "arguments": "{\"a\": 1}"}}
CHATS = [
    turns("What is a stage?", "A part of the model."),
    turns("Hi", "Hello", "And a bubble?", "Idle time.", "Thanks", "Bye", system="Be brief."),
    turns("No system", "None", system=""),
    turns("", "", "x", ""),
    turns("  blanks before", "  and after  \n", "\n\nnew lines\n", "\n\ntwo\n\nand more\n\n\n"),
    turns("same", "same", "same", "same", system="same"),
    turns("a { brace }, {{ two }} and {% a tag %}", "{{ messages }} {# a comment #} {%- endfor %}",
          "\\n is no new line", "\\ and \\\\ and ' and \" and `"),
    turns("naïve café — 漢字かな 🦀🦀", "e\u0301 is not \u00e9; \ufb01 and \u2460",
          "\u202eright to left\u202c עברית", "zero\u200bwidth\u200d\ufe0f 👩‍👩‍👧 and \U0010ffff"),
    turns("odd blanks", "\u00a0\u2003 no-break and em \u3000\u2028", "\u200b", "\x85 next \x85"),
    turns("one <think>", "<think>\nnot told\n</think>\n\nThe answer.", "and then?", "It waits."),
    turns("one </think>", "<think>\ntold\n</think>\n\nThe answer."),
    turns("a" * 300, "b c " * 80),
    turns("question", "answer", "unanswered"),
    [*turns("Find it."), {"role": "assistant", "content": "", "tool_calls": [CALL, SAID]},
     {"role": "tool", "content": "{\"found\": []}"}, {"role": "assistant", "content": "Nothing."}],
    [*turns("one", "two"), {"role": "assistant", "content": "three"}],
    [{"role": "system", "content": "You begin."}, {"role": "assistant", "content": "Hello"},
     *turns("And?", "So I did.")],
    [*turns("Hi", "Hello"), {"role": "system", "content": "Now be long."}, *turns("So?", "So.")],
]
OTHERS = [
    {"text": "plain text"}, {"text": ""}, {"text": "a"},
    {"text": "  two  blanks\n\n\tand a tab \r\n"},
    {"text": "naïve café — 漢字 🦀🦀 \ufb01"}, {"text": "an end </s> in <|endoftext|> the text"},
    {"text": "an end at the end</s>"}, {"text": "an end at the end<|endoftext|>"},
    {"prompt": "Dear", "completion": " friend of pipelines"},
    {"prompt": "Dear ", "completion": "friend"}, {"prompt": "", "completion": "no prompt"},
    {"prompt": "no completion", "completion": ""}, {"prompt": "", "completion": ""},
    {"prompt": "caf", "completion": "é 漢"}, {"prompt": "the e", "completion": "\u0301nd"},
    {"prompt": "one wo", "completion": "rd of two"}, {"prompt": "Q\n", "completion": "\nA\n"},
    {"prompt": "ends", "completion": " here</s>"},
]

EXAMPLES = [
    {"messages": turns("What is a stage?", "A cell of the model, placed on a device.")},
    {"messages": turns("Hi", "Hello", "A bubble?", "Idle time.", system="Be brief.")},
    {"messages": turns("And then?", "It waits {for} the others: é漢字.")},
    {"prompt": "Dear", "completion": " friend of pipelines"},
    {"prompt": "A mini-batch has ", "completion": "micro-batches"},
    {"text": "A schedule is an ordered list of actions."},
    {"text": "Short."},
]
HELD_OUT = [
    {"messages": turns("What is a plan?", "Partition, schedule and policy.")},
    {"prompt": "Idle", "completion": " time"},
    {"text": "What crosses stages is kept."},
]
# name: rank, alpha, targets, packing
ADAPTERS = {
    "llama": (3, 6.0, ["*"], "separate"),
    "qwen2.5": (4, 5.0, ["*"], "separate"),
    "qwen3": (2, 1.0, ["q_proj", "v_proj", "model.layers.1.mlp.*"], "separate"),
    "mistral": (3, 4.0, ["q_proj", "k_proj", "down_proj"], "separate"),
    "gpt2": (2, 3.0, ["*"], "none"),
}
LENGTH = 128  # of a row
LR, BETAS, EPS, DECAY, STEPS = 0.01, (0.9, 0.97), 1e-8, 0.1, 5


def expect(what, own, other):
    if own != other:
        packages.fail(f"{what} differ:\n  gpipe        {own!r}\n  transformers {other!r}")


def within(what, apart, column, dtype="float64"):
    tolerance = TOLERANCE[dtype][column]
    if not apart <= tolerance:  # a NaN is wrong, too
        packages.fail(f"{what} differ by {apart:.1e}, allowed is {tolerance:.0e}")
    return apart


def relative(own, other):
    return abs(own - other) / abs(other)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def samples_of(folder, lines):
    """The samples, texts and refusals of `gpipe` for these lines."""
    path = write_lines(folder / "lines.jsonl", lines)
    done = subprocess.run([ROOT / "target" / "debug" / "sample_ids", folder, path], text=True,
                          capture_output=True)
    if done.returncode:
        packages.fail(f"sample_ids {folder}: {done.stderr}")
    return json.loads(done.stdout)


def rendered(fast, messages, **keys):
    return fast.apply_chat_template(messages, tokenize=False, **keys)


def answers(fast, messages, text, end):
    """The character ranges of the assistant's turns, each from the end of its generation prompt."""
    parts, last = [], 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = messages[:number]
            prompt = rendered(fast, before, add_generation_prompt=True)
            start = len(prompt)
            if not text.startswith(prompt):  # the template writes the earlier turns differently
                begins = prompt.removeprefix(rendered(fast, before))
                start = text.index(begins, last) + len(begins)
            last = text.index(end, start) + len(end)
            parts.append((start, last))
    return parts


def encoded(fast, text, parts, adds):
    """The tokens of a text and their loss mask: whether the first character is in `parts`."""
    found = fast(text, add_special_tokens=adds, return_offsets_mapping=True)
    learned = [start < end and any(first <= start < last for first, last in parts)
               for start, end in found.offset_mapping]
    return found.input_ids, learned


def sample(fast, line, end=None):
    """The tokens of a line and their loss mask."""
    if "messages" in line:
        text = rendered(fast, line["messages"])
        return encoded(fast, text, answers(fast, line["messages"], text, end), False)
    text = line.get("prompt", "") + line.get("completion", line.get("text", ""))
    ids, learned = encoded(fast, text, [(len(line.get("prompt", "")), len(text))], True)
    if not ids or ids[-1] != fast.eos_token_id:
        return [*ids, fast.eos_token_id], [*learned, True]
    return ids, [*learned[:-1], True]


def shifted(ids, learned):
    """The inputs and targets of a sample."""
    return [ids[:-1], [token if is_learned else IGNORE
                       for token, is_learned in zip(ids[1:], learned[1:], strict=True)]]


def prepared(kind, template, folder):
    """Writes the folder of a tokenizer with a template."""
    fast = copy.deepcopy(kind)
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def with_special(kind):
    fast = tokenizer(kind)
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>",
                             "additional_special_tokens": SPECIAL})
    return fast


def check_chats(name, fast, folder):
    template, end = TEMPLATES[name]
    fast = prepared(fast, template, folder)
    ours = samples_of(folder, [{"messages": chat} for chat in CHATS])
    told = [reason for reason in ours["refused"] if "cannot be found" in reason]
    expect(f"{name}: conversations in which no answer is found", told, [])
    samples, tokens, count, refused = iter(ours["samples"]), 0, 0, 0
    expect(f"{name}: number of texts", len(ours["texts"]), len(CHATS))
    for own, chat in zip(ours["texts"], CHATS, strict=True):
        try:
            both = [rendered(fast, chat), rendered(fast, chat, add_generation_prompt=True)]
        except TemplateError as error:
            expect(f"{name}: refusals of {chat}", isinstance(own, str) and str(error) in own, True)
            refused += 1
            continue
        expect(f"{name}: texts", own, both)
        ids, learned = sample(fast, {"messages": chat}, end)
        if template is GENERATION:
            theirs = fast.apply_chat_template(chat, return_dict=True,
                                              return_assistant_tokens_mask=True)
            expect(f"{name}: transformers' tokens of {chat}", ids, theirs["input_ids"])
            expect(f"{name}: transformers' mask of {chat}", [int(own) for own in learned],
                   theirs["assistant_masks"])
        own, expected = next(samples), shifted(ids, learned)
        expect(f"{name}: tokens of {both[0]!r}", own[0], expected[0])
        expect(f"{name}: targets of {both[0]!r}", shown(fast, own[1]), shown(fast, expected[1]))
        tokens, count = tokens + len(ids), count + sum(learned)
    expect(f"{name}: numbers of refused lines", len(ours["refused"]), refused)
    return f"{len(CHATS):8} {tokens:8} {count:8} {refused:8}"


def shown(fast, targets):
    """The targets as readable tokens."""
    return [own if own == IGNORE else (own, fast.convert_ids_to_tokens(own)) for own in targets]


def check_others(fast, folder):
    """Compares texts, and prompts with completions."""
    fast = prepared(fast, None, folder)
    ours = samples_of(folder, OTHERS)
    every = [sample(fast, line) for line in OTHERS]
    kept = [(line, own) for line, own in zip(OTHERS, every, strict=True) if any(own[1][1:])]
    expect("number of samples", len(ours["samples"]), len(kept))
    for own, (line, expected) in zip(ours["samples"], kept, strict=True):
        inputs, targets = shifted(*expected)
        expect(f"tokens of {line}", own[0], inputs)
        expect(f"targets of {line}", shown(fast, own[1]), shown(fast, targets))
    refused = len(OTHERS) - len(kept)
    expect("number of refused lines", len(ours["refused"]), refused)
    return (f"{len(OTHERS):8} {sum(len(own[0]) for own in every):8} "
            f"{sum(sum(own[1]) for own in every):8} {refused:8}")


def padded(samples):
    """Samples as rows of inputs and targets, one sample per row."""
    rows = [shifted(*own) for own in samples]
    length = max(len(inputs) for inputs, _ in rows)
    return [torch.tensor([row + [fill] * (length - len(row)) for row in part])
            for part, fill in zip(zip(*rows), (0, IGNORE))]


def loss_of(model, samples):
    inputs, targets = padded(samples)
    lengths = torch.tensor([[len(ids) - 1] for ids, _ in samples])
    mask = torch.arange(inputs.shape[1]) < lengths
    logits = model(inputs, attention_mask=mask.long()).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adapted(folder, adapter):
    """The model of a folder with an adapter to train."""
    model = peft.PeftModel.from_pretrained(load(folder), adapter, is_trainable=True)
    expect(f"matrices of {adapter.name}", matrices(adapter).keys(), parameters(model).keys())
    for name, own in parameters(model).items():
        if not torch.equal(own, matrices(adapter)[name]):
            packages.fail(f"{name} of {adapter.name} is not what PEFT loads")
    return model


def matrices(adapter):
    return load_file(adapter / "adapter_model.safetensors")


def parameters(model):
    return {name.replace(".default.", "."): own.detach().clone()
            for name, own in model.named_parameters() if own.requires_grad}


def gradients(model, samples):
    model.zero_grad()
    loss = loss_of(model, samples)
    loss.backward()
    found = {name.replace(".default.", "."): own.grad.clone()
             for name, own in model.named_parameters() if own.requires_grad}
    return loss.item(), found


def trained(model, samples):
    """Trains the model with AdamW. Returns the losses of the steps."""
    own = [own for own in model.parameters() if own.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses = []
    for _ in range(STEPS):
        losses.append(gradients(model, samples)[0])
        optimizer.step()
    return losses


def losses_of(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind", "step") == "step"]


def farthest(ours, theirs):
    return max(norm for _, _, norm in distances(ours, theirs))


class Trainings:
    """Trainings by `gpipe` of the same adapters and samples."""

    def __init__(self, case, aside):
        self.aside, self.folder = aside, aside / "model"
        rank, alpha, targets, packing = ADAPTERS[case]
        self.fast = make(case, self.folder)
        self.fast.add_special_tokens({"additional_special_tokens": SPECIAL[:2]})
        self.fast.chat_template = CHATML
        self.fast.save_pretrained(self.folder)
        if case == "gpt2":
            edit(lambda c: c.update(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0))(self.folder)
        self.held_out = write_lines(aside / "held_out.jsonl", HELD_OUT)
        self.settings = [
            "--from", self.folder, "--data", write_lines(aside / "lines.jsonl", EXAMPLES), "--lora",
            rank, "--dtype", "float64", "--stages", 2, "--micro-batches", 2,
            *sets(lora__alpha=alpha, lora__targets=json.dumps(targets), data__sequence=LENGTH,
                  data__packing=packing, data__cache="off", pipeline__loss_rows=20,
                  data__validation=json.dumps([str(self.held_out)]), optimizer__clip_norm=0.0,
                  optimizer__warmup_steps=0, optimizer__decay="constant")]

    def samples(self, lines):
        return [sample(self.fast, line, TEMPLATES["chatml"][1]) for line in lines]

    def train(self, name, rows, steps, **keys):
        """Trains on mini-batches of `rows` rows. Returns the run's folder and the output."""
        run = self.aside / name
        printed = gpipe("train", *self.settings, "--out", run, "--steps", steps,
                        *sets(train__mini_batch=rows, **keys))
        return run, printed

    def adapter(self, source):
        """The adapter of a run or checkpoint in the format of PEFT."""
        to = self.aside / f"adapter-of-{source.name}"
        gpipe("export", source, "--to", to, "--adapter")
        return to


def sets(**keys):
    """Keys of the configuration as arguments; `__` stands for a dot."""
    pairs = [f"{key.replace('__', '.')}={own}" for key, own in keys.items()]
    return [part for pair in pairs for part in ("--set", pair)]


def check_gradients(ours, start, rows, samples):
    """Compares two steps of SGD. Differences of parameters give gpipe's gradients."""
    run, _ = ours.train("sgd", rows, 2, optimizer__name="sgd", optimizer__lr=1.0,
                        checkpoint__every=1)
    points = [start, *(ours.adapter(run / "checkpoints" / f"step-{step:08}") for step in (1, 2))]
    learned = sum(sum(own[1][1:]) for own in samples)
    loss, gradient = 0.0, 0.0
    for step, line in enumerate(losses_of(run), 1):
        expect("numbers of tokens to learn", line["tokens"], learned)
        before, after = (matrices(point) for point in points[step - 1:step + 1])
        value, theirs = gradients(adapted(ours.folder, points[step - 1]), samples)
        loss = max(loss, within(f"losses of step {step}", relative(line["loss"], value), "loss"))
        found = {name: own - after[name] for name, own in before.items()}
        gradient = max(gradient, within(f"gradients of step {step}", farthest(found, theirs),
                                        "gradient"))
    return loss, gradient


def check_steps(ours, start, rows, samples):
    """The run of five steps of AdamW, its adapter, and the difference of the parameters."""
    model = adapted(ours.folder, start)
    run, _ = ours.train("adamw", rows, STEPS, optimizer__name="adamw", optimizer__lr=LR,
                        optimizer__weight_decay=DECAY, optimizer__adam__beta1=BETAS[0],
                        optimizer__adam__beta2=BETAS[1], optimizer__adam__eps=EPS)
    losses = trained(model, samples)
    for step, (line, value) in enumerate(zip(losses_of(run), losses, strict=True), 1):
        within(f"losses of AdamW's step {step}", relative(line["loss"], value), "parameters")
    adapter = ours.adapter(run)
    apart = farthest(matrices(adapter), parameters(model))
    return run, adapter, within("parameters", apart, "parameters")


def check_exports(ours, run, adapter):
    """The differences of losses: with the adapter, and of the merged model in both dtypes."""
    held_out = ours.samples(HELD_OUT)
    own = gpipe("eval", run, "--data", ours.held_out, "--json", json_lines=True)[0]["loss"]

    def apart(what, model, dtype):
        with torch.no_grad():
            theirs = loss_of(model, held_out).item()
        return within(f"losses {what}", relative(own, theirs), "loss", dtype)

    for dtype in ("float64", "float32"):
        gpipe("export", run, "--to", ours.aside / dtype, "--dtype", dtype)
    single = transformers.AutoModelForCausalLM.from_pretrained(ours.aside / "float32").eval()
    expect("dtypes", torch.float32, single.dtype)
    return (apart("with the adapter", adapted(ours.folder, adapter), "float64"),
            apart("of the merged model", load(ours.aside / "float64"), "float64"),
            apart("of the merged model in float32", single, "float32"))


def check_adapters(case, aside):
    ours = Trainings(case, aside)
    samples = ours.samples(EXAMPLES)
    # A learning rate of 0 leaves the first adapter as it is.
    run, printed = ours.train("start", 2, 1, optimizer__lr=0.0)
    rows = int(re.search(r"(\d+) rows of", printed).group(1))
    expect("sharing of rows", 1 < rows < len(EXAMPLES), ADAPTERS[case][3] == "separate")
    start = ours.adapter(run)
    loss, gradient = check_gradients(ours, start, rows, samples)
    run, adapter, steps = check_steps(ours, start, rows, samples)
    line = (loss, gradient, steps, *check_exports(ours, run, adapter))
    return f"{len(EXAMPLES):8} {rows:5}" + "".join(f"{own:11.1e}" for own in line)


def table(head, columns, names, check):
    """Prints the table of a check of each name."""
    if not names:
        return
    print(f"{head:24}{columns} {'s':>6}", flush=True)
    for name in names:
        print(f"{name:24}", end="", flush=True)  # names what fails
        begin = time.time()
        with tempfile.TemporaryDirectory() as aside:
            line = check(name, Path(aside))
        print(f"{line} {time.time() - begin:6.1f}", flush=True)
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description="Compares gpipe with transformers and PEFT.")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # PEFT's, of calls that transformers renamed
    for package, binary in (("gpipe-cli", "gpipe"), ("gpipe-drivers", "sample_ids")):
        subprocess.run(["cargo", "build", "--quiet", "--locked", "--package", package, "--bin",
                        binary], cwd=ROOT, check=True)
    kinds = {kind: with_special(kind) for kind in KINDS}

    def check_lines(name, folder):
        template, kind = name.split("/")
        if template == "none":
            return check_others(kinds[kind], folder)
        return check_chats(template, kinds[kind], folder)

    lines = [name for template in (*TEMPLATES, "none") for kind in KINDS
             if options.only in (name := f"{template}/{kind}")]
    columns = ("texts", "tokens", "learned", "refused")
    table("template/tokenizer", " ".join(f"{own:>8}" for own in columns), lines, check_lines)
    cases = [name for name in ADAPTERS if options.only in name]
    columns = ("loss", "gradient", "parameters", "adapter", "merged", "in float32")
    table("adapters", f"{'samples':>8} {'rows':>5}" + "".join(f"{own:>11}" for own in columns),
          cases, check_adapters)
    print(f"fine-tuning as in transformers {transformers.__version__} and PEFT {peft.__version__}: "
          f"{len(lines)} kinds of samples, {len(cases)} models with adapters")


if __name__ == "__main__":
    main()
