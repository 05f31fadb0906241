"""Modules of all kinds, as sequences: what people build, and what is hard to pipeline.

Each entry makes a fresh model and a mini-batch. `exact` says that its gradients can be compared
with plain PyTorch's, because nothing in it is random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import gpipe
from gpipe.skip import Pop, Stash

SAMPLES = 8


@dataclass
class Entry:
    make: Callable[[], tuple[nn.Module, object]]
    exact: bool
    """Whether nothing in it is random."""
    norms: bool
    """Whether it computes with a whole micro-batch, as batch norms do, so that a comparison loops
    over micro-batches."""


ZOO: dict[str, Entry] = {}


def entry(*, exact: bool = True, norms: bool = False):
    def add(make):
        ZOO[make.__name__] = Entry(make, exact, norms)
        return make
    return add


def floats(*shape):
    return torch.randn(SAMPLES, *shape)


def tokens(length, vocabulary):
    return torch.randint(vocabulary, (SAMPLES, length))


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@entry()
def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 3)), floats(6)


@entry(exact=False)
def encoder_layers():
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
              for _ in range(3)]
    return nn.Sequential(nn.Embedding(30, 16), *layers, nn.Linear(16, 30)), tokens(6, 30)


@entry(exact=False)
def decoder_layers():
    class Decode(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

        def forward(self, pair):
            target, memory = pair
            return self.layer(target, memory), memory

    both = (floats(5, 16), floats(7, 16))
    return nn.Sequential(Decode(), Decode(), Decode(), Apply(lambda pair: pair[0])), both


@entry(exact=False)
def multihead_attention_with_weights():
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, dropout=0.2, batch_first=True)

        def forward(self, x):
            y, weights = self.attention(x, x, x, need_weights=True)
            return y + weights.mean()

    return nn.Sequential(Attend(), nn.LayerNorm(16), Attend(), nn.Linear(16, 4)), floats(6, 16)


@entry(exact=False)
def attention_dropout_of_a_function():
    class Attend(nn.Module):
        def __init__(self, causal):
            super().__init__()
            self.causal, self.proj = causal, nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.proj(x).view(x.size(0), -1, 2, 24).transpose(1, 2).chunk(3, -1)
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=self.causal)
            return y.transpose(1, 2).flatten(2)

    return nn.Sequential(Attend(True), Attend(False), nn.Linear(16, 2)), floats(5, 16)


def _gpt2(dropout):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=3, n_head=2,
                        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    model = GPT2LMHeadModel(config).train()

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = model.transformer.wte, model.transformer.wpe
            self.drop = model.transformer.drop

        def forward(self, ids):
            return self.drop(self.wte(ids) + self.wpe.weight[:ids.size(1)])

    class Block(nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x):
            y = self.block(x)
            return y[0] if isinstance(y, tuple) else y

    blocks = [Block(block) for block in model.transformer.h]
    # The head is tied to the embedding.
    return nn.Sequential(Positions(), *blocks, model.transformer.ln_f, model.lm_head), tokens(6, 40)


@entry()
def hugging_face_gpt2():
    return _gpt2(0.0)


@entry(exact=False)
def hugging_face_gpt2_with_dropout():
    return _gpt2(0.1)


@entry()
def hugging_face_llama():
    from huggingface import layers
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2,
                         max_position_embeddings=32)
    model = LlamaForCausalLM(config).train()

    return layers(model), tokens(6, 40)


@entry()
def hugging_face_vit():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
                       intermediate_size=32, image_size=16, patch_size=8, hidden_dropout_prob=0.0,
                       attention_probs_dropout_prob=0.0)
    model = ViTModel(config, add_pooling_layer=False).train()

    class Block(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            y = self.layer(x)
            return y[0] if isinstance(y, tuple) else y

    blocks = [Block(layer) for layer in model.layers] if hasattr(model, "layers") else [
        Block(layer) for layer in model.encoder.layer]
    return nn.Sequential(model.embeddings, *blocks, model.layernorm,
                         Apply(lambda x: x[:, 0]), nn.Linear(16, 3)), floats(3, 16, 16)


@entry(norms=True)
def torchvision_resnet():
    from torchvision.models import resnet18

    model = resnet18(num_classes=4, norm_layer=lambda size: nn.BatchNorm2d(size))
    parts = ["conv1", "bn1", "relu", "maxpool", "layer1.*", "layer2.*", "layer3.*", "layer4.*",
             "avgpool", nn.Flatten(), "fc"]
    return gpipe.sequence(model, parts), floats(3, 40, 40)


@entry(exact=False)
def torchvision_convnext():
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    settings = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)]
    model = ConvNeXt(settings, stochastic_depth_prob=0.3, num_classes=3)
    return gpipe.sequence(model, ["features.*", "avgpool", "classifier"]), floats(3, 16, 16)


@entry()
def lstm():
    return nn.Sequential(nn.Embedding(20, 8), nn.LSTM(8, 12, batch_first=True),
                         Apply(lambda pair: pair[0]), nn.Linear(12, 4)), tokens(5, 20)


@entry(exact=False)
def lstm_with_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 6, 2, dropout=0.5, batch_first=True),
                         Apply(lambda pair: pair[0]), nn.Linear(6, 2)), floats(5, 4)


@entry()
def gru_and_its_state():
    class Last(nn.Module):
        def forward(self, pair):
            return torch.cat([pair[0][:, -1], pair[1][-1]], -1)

    class Gru(nn.Module):
        def __init__(self):
            super().__init__()
            self.gru = nn.GRU(4, 6, batch_first=True)

        def forward(self, x):
            y, state = self.gru(x)
            return y, state.transpose(0, 1).contiguous().transpose(0, 1)

    return nn.Sequential(Gru(), Apply(lambda pair: torch.cat([pair[0][:, -1], pair[1][0]], -1)),
                         nn.Linear(12, 2)), floats(5, 4)


@entry(norms=True)
def batch_norms():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
                         nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(),
                         nn.BatchNorm1d(64), nn.Linear(64, 3)), floats(3, 8, 8)


@entry(norms=True)
def batch_norms_without_parameters_or_statistics():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8),
                         nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 2)), floats(5)


@entry()
def a_frozen_batch_norm():
    norm = nn.BatchNorm1d(8)
    norm.running_mean.uniform_(-1, 1)
    model = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 2))
    norm.eval()
    norm.requires_grad_(False)
    return model, floats(5)


@entry(exact=False)
def dropouts():
    return nn.Sequential(nn.Conv1d(4, 6, 1), nn.Dropout(0.2), nn.Conv1d(6, 6, 1), nn.Dropout1d(0.3),
                         nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2), nn.Unflatten(1, (3, 2)),
                         nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(30, 2)), floats(4, 5)


@entry(exact=False)
def dropout_across_the_samples():
    # Its first axis is not the samples'.
    class Across(nn.Module):
        def forward(self, x):
            return F.dropout(x.transpose(0, 1), 0.3, self.training).transpose(0, 1)

    return nn.Sequential(nn.Linear(4, 4), Across(), nn.Linear(4, 2)), floats(3, 4)


@entry(exact=False)
def random_operators():
    class Noise(nn.Module):
        def forward(self, x):
            if not self.training:
                return x
            mask = torch.empty_like(x).bernoulli_(0.8)
            noise = torch.randn_like(x) + torch.rand(x.shape[1:], device=x.device)
            return x * mask + noise * 0.1

    class Shuffle(nn.Module):
        def forward(self, x):
            return x[:, torch.randperm(x.size(1))] if self.training else x

    layers = nn.Linear(4, 6), nn.RReLU(), Noise(), Shuffle(), nn.Linear(6, 2)
    return nn.Sequential(*layers), floats(4)


@entry(exact=False)
def a_checkpoint_with_dropout_inside():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def part(self, x):
            return F.dropout(torch.tanh(self.a(x)), 0.4, self.training) + 0.1 * torch.rand_like(x)

        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
            return self.b(F.dropout(x, 0.2, self.training))

    return nn.Sequential(Inner(), Inner(), nn.Linear(6, 2)), floats(6)


@entry()
def tied_across_layers():
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), head), tokens(4, 20)


@entry()
def tied_within_a_layer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    return nn.Sequential(Tied(), nn.ReLU(), Tied(), nn.Linear(6, 2)), floats(6)


@entry()
def one_module_twice():
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(6, 2)), floats(6)


@entry()
def frozen_parts():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model, floats(6)


@entry()
def parts_without_gradients():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = nn.Linear(6, 6), nn.Linear(6, 6)
            self.scale.requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                scale = torch.sigmoid(self.scale(x))
            return self.linear(x) * scale

    return nn.Sequential(nn.Linear(6, 6), Part(), Part(), nn.Linear(6, 2)), floats(6)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 3 * x ** 2 * grad


@entry()
def own_autograd_functions():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Apply(_Cube.apply), nn.Linear(6, 6),
                         Apply(_Cube.apply), nn.Linear(6, 2)), floats(6)


@entry()
def tuples():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 5)

        def forward(self, x):
            return self.a(x), self.b(x)

    class Join(nn.Module):
        def forward(self, pair):
            return torch.cat(pair, -1)

    layers = Split(), Join(), nn.Linear(9, 6), Split(), Join(), nn.Linear(9, 2)
    return nn.Sequential(*layers), floats(6)


@entry()
def dictionaries_with_values_that_are_no_tensors():
    class Make(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 4)

        def forward(self, given):
            return {"x": [self.a(given["x"]), given["x"]], "scale": 2.0, "nothing": None}

    class Use(nn.Module):
        def forward(self, given):
            assert given["nothing"] is None
            return torch.cat(given["x"], -1) * given["scale"]

    return nn.Sequential(Make(), Use(), nn.Linear(10, 2)), {"x": floats(6)}


@entry()
def parametrizations():
    from torch.nn.utils.parametrizations import weight_norm

    return nn.Sequential(weight_norm(nn.Linear(6, 8)), nn.GroupNorm(2, 8), nn.ReLU(),
                         weight_norm(nn.Linear(8, 4)), nn.Linear(4, 2)), floats(6)


@entry(norms=True)  # of each micro-batch
def depends_on_its_values():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.a(x) + self.b(x) if x.sum().item() > 0 else self.b(x) * self.a(x)

    return nn.Sequential(nn.Linear(6, 6), Switch(), Switch(), nn.Linear(6, 2)), floats(6)


@entry()
def skips():
    return nn.Sequential(nn.Linear(6, 6), Stash("a"), nn.Tanh(), Stash("b"), nn.Linear(6, 6),
                         Pop("a"), nn.Tanh(), Pop("b", torch.mul), nn.Linear(6, 2)), floats(6)


@entry()
def torchgpipes_skips():
    from gpipe.compat.skip import Namespace, pop, skippable, stash

    @skippable(stash=["x", "none"])
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            yield stash("x", x)
            yield stash("none", None)
            return self.linear(x)

    @skippable(pop=["x", "none"])
    class Last(nn.Module):
        def forward(self, x):
            skip = yield pop("x")
            none = yield pop("none")
            assert none is None
            return x * skip

    one, two = Namespace(), Namespace()
    return nn.Sequential(First().isolate(one), First().isolate(two), nn.Tanh(), Last().isolate(two),
                         Last().isolate(one), nn.Linear(6, 2)), floats(6)


@entry()
def buffers_that_stay():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            angle = torch.arange(8).float()[:, None] / torch.tensor([1.0, 10, 100])
            self.register_buffer("table", torch.cat([angle.sin(), angle.cos()], -1))
            self.register_buffer("mask", torch.ones(8, 8).tril().bool(), persistent=False)

        def forward(self, x):
            x = x + self.table[:x.size(1)]
            scores = (x @ x.transpose(1, 2)).masked_fill(
                self.mask[:x.size(1), :x.size(1)].logical_not(), -math.inf)
            return scores.softmax(-1) @ x

    return nn.Sequential(nn.Linear(6, 6), Positions(), Positions(), nn.Linear(6, 2)), floats(5, 6)


@entry()
def convolutions_of_all_kinds():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.InstanceNorm2d(4),
                         nn.ReLU6(inplace=True), nn.ConvTranspose2d(4, 4, 2, stride=2),
                         nn.MaxPool2d(2), nn.PixelShuffle(2),
                         nn.Conv2d(1, 4, 3, groups=1), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(16, 2)), floats(3, 8, 8)
