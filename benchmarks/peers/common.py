"""What the peers share, whatever the network: a sequence of named layers, files of tensors,
threads, memory.

A layer takes the values that the layer before gave, and gives a tensor or a tuple of tensors.
Layers and parameters have gpipe's names, so that a safetensors file which gpipe wrote loads by
name.
"""

import ctypes
import functools
import json
import struct

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# What is recomputed in the backward: each part for itself; all at once; each part but what
# products, convolutions and attention gave.
CHECKPOINTS = ["parts", "stage", "selective"]
COSTLY = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
          torch.ops.aten.convolution.default,
          torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
          torch.ops.aten._scaled_dot_product_flash_attention.default,
          torch.ops.aten._scaled_dot_product_efficient_attention.default,
          torch.ops.aten._scaled_dot_product_cudnn_attention.default]


def as_tuple(values):
    return values if isinstance(values, tuple) else (values,)


def one_or_all(values):
    return values[0] if len(values) == 1 else values


class Part(nn.Module):
    """Consecutive layers that are recomputed together."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *values):
        for layer in self.layers:
            values = as_tuple(layer(*values))
        return values


class Network(nn.Module):
    """Consecutive layers of a network, given as (name, layer): all of them, or a stage's.

    `checkpoint` is one of CHECKPOINTS or None. A part is a numbered layer, or the layers of one
    number (`0.attention` and `0.mlp`). Layers without a number (`embedding`, `stem`, `classifier`)
    are not recomputed.
    """

    def __init__(self, layers, checkpoint=None):
        super().__init__()
        self.names = [name for name, _ in layers]
        self.recomputed, groups = [], []
        for name, layer in layers:
            number = name.split(".")[0] if name[0].isdigit() else name
            together = "all" if checkpoint == "stage" else number
            if groups and groups[-1][0] == together:
                groups[-1][1].append(layer)
            else:
                groups.append((together, [layer]))
                numbered = any(letter.isdigit() for letter in number)
                self.recomputed.append(checkpoint == "stage"
                                       or (checkpoint is not None and numbered))
        # There is no dropout, so the generator's state does not matter.
        self.how = {"use_reentrant": False, "preserve_rng_state": False}
        if checkpoint == "selective":
            self.how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, COSTLY)
        self.parts = nn.ModuleList(Part(group) for _, group in groups)

    def forward(self, *values):
        for part, recomputed in zip(self.parts, self.recomputed):
            if recomputed:
                values = checkpoint(part, *values, **self.how)
            else:
                values = part(*values)
        return one_or_all(values)

    def named(self, buffers=False):
        """Parameters (and buffers, if asked) by gpipe's names; a tied one once."""
        found = {}
        layers = [layer for part in self.parts for layer in part.layers]
        for name, layer in zip(self.names, layers, strict=True):
            for own, tensor in [*layer.named_parameters(),
                                *(layer.named_buffers() if buffers else [])]:
                if all(tensor is not other for other in found.values()):
                    found[f"{name}.{own}"] = tensor
        return found

    @torch.no_grad()
    def load(self, values):
        for name, tensor in self.named(buffers=True).items():
            tensor.copy_(values[name])


class ChannelsLast(nn.Module):
    """A network of images whose values lie as [samples, height, width, channels]. Between stages
    they have that shape, too, because what is sent must be contiguous.
    """

    def __init__(self, network, first=True, last=True):
        super().__init__()
        self.network, self.first, self.last = (
            network.to(memory_format=torch.channels_last), first, last)

    def forward(self, *values):
        if self.first:
            values = [value.contiguous(memory_format=torch.channels_last) for value in values]
        else:
            values = [value.permute(0, 3, 1, 2) for value in values]
        values = as_tuple(self.network(*values))
        # A copy, not a view: a split backward detaches in place what a stage gave.
        return one_or_all(values if self.last else
                          tuple(value.permute(0, 2, 3, 1).clone() for value in values))


def read_safetensors(path):
    kinds = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(data[start:end], dtype=kinds[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).clone()
    return tensors


def synchronize(device):
    """Waits for a GPU's kernels; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def set_up(threads):
    """Threads, an allocator that keeps freed memory instead of asking for the same pages in each
    step, and full float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and stay there
    except OSError:
        pass  # not glibc


class PeakMemory:
    """Within `with`, if asked: the most bytes of tensors that this thread had allocated there at
    once.

    A profiler sees every allocation, so the steps' times are then not to be used.
    """

    def __init__(self, asked):
        self.profile = (profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                        if asked else None)
        self.bytes = None

    def __enter__(self):
        if self.profile:
            self.profile.__enter__()
        return self

    def __exit__(self, *failure):
        if not self.profile:
            return
        self.profile.__exit__(*failure)
        events = [event for event in self.profile.profiler.kineto_results.events()
                  if event.name() == "[memory]"]
        live = self.bytes = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()  # below 0 where memory is given back
            self.bytes = max(self.bytes, live)
