"""The models of bench_step in plain PyTorch: GPT-2 and BERT as nn/models has
them, the others as bench/step_models.h."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PreNormBlock(nn.Module):
    """Pre-LayerNorm, biases; of GPT-2 with a causal mask and tanh GELU, of ViT with neither."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.head_size, self.causal = width // heads, causal
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        batch, time, width = q.shape  # under tensor parallelism x has fewer tokens, or q fewer heads
        q, k, v = (t.view(batch, time, -1, self.head_size).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, time, width))
        form = "tanh" if self.causal else "none"
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate=form))


class Gpt(nn.Module):
    """Learned positions, a head tied to the token embedding; returns the mean loss."""

    def __init__(self, layers, width, heads, context, vocab):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PreNormBlock(width, heads, True) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


class BertBlock(nn.Module):
    """LayerNorm of the sum behind each sublayer, exact GELU, dropout of what a sublayer adds."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dense = nn.Linear(width, width)
        self.ln_1 = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        self.ln_2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (part(x).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
                   for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        y = self.dense(y.transpose(1, 2).reshape(batch, time, width))
        x = self.ln_1(x + F.dropout(y, self.dropout, self.training))
        y = self.output(F.gelu(self.intermediate(x)))
        return self.ln_2(x + F.dropout(y, self.dropout, self.training))


class Bert(nn.Module):
    """BERT for two classes; returns the mean loss."""

    def __init__(self, layers, width, heads, context, vocab, dropout=0.1):
        super().__init__()
        self.dropout = dropout
        self.words = nn.Embedding(vocab, width, padding_idx=0)
        self.positions = nn.Embedding(context, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.blocks = nn.ModuleList(BertBlock(width, heads, dropout) for _ in range(layers))
        self.pooler = nn.Linear(width, width)
        self.classifier = nn.Linear(width, 2)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids, labels):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x + self.types(torch.zeros_like(ids)))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return F.cross_entropy(self.classifier(F.dropout(pooled, self.dropout, self.training)), labels)


class Cnn(nn.Module):
    """examples/cv_example.cpp; returns the mean loss."""

    def __init__(self):
        super().__init__()
        self.conv_1 = nn.Conv2d(1, 16, 5)
        self.conv_2 = nn.Conv2d(16, 32, 5)
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images, labels):
        x = F.max_pool2d(F.relu(self.conv_1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv_2(x)), 2).flatten(1)
        return F.cross_entropy(self.classifier(F.dropout(x, 0.25, self.training)), labels)


class Vit(nn.Module):
    """Patches of 4 x 4, learned positions, the mean of all patches; returns the mean loss."""

    def __init__(self, layers, width, heads, patches, classes):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.blocks = nn.ModuleList(PreNormBlock(width, heads, False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images, labels):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class LstmLm(nn.Module):
    """Embedding, LSTM, head; returns the mean loss."""

    def __init__(self, layers, width, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens, targets):
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary embedding, SwiGLU, half as many heads of keys and values, no biases."""

    def __init__(self, width, heads):
        super().__init__()
        inner = (8 * width // 3 + 63) // 64 * 64
        self.head_width = width // heads
        self.norm_1 = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width // 2, bias=False)
        self.v = nn.Linear(width, width // 2, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        batch, time, width = x.shape
        y = self.norm_1(x)
        q, k, v = (part(y).view(batch, time, -1, self.head_width).transpose(1, 2)
                   for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v,
                                           is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, time, width))
        z = self.norm_2(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Llama(nn.Module):
    """Returns the mean loss."""

    def __init__(self, layers, width, heads, context, vocab):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        head_width = width // heads
        rates = torch.exp(torch.arange(head_width // 2) * (-2 * math.log(10000.0) / head_width))
        angles = torch.arange(context).unsqueeze(1) * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        # In autocast the products of q and k with an f32 table would become f32.
        low = torch.get_autocast_dtype(x.device.type)
        dtype = low if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_and_batch(name, layers, width, heads, context, vocab, batch_size):
    """A model of --model with its inputs and targets."""
    if name == "cnn":
        return Cnn(), torch.randn(batch_size, 1, 28, 28), torch.randint(10, (batch_size,))
    if name == "vit":
        side = 4 * math.isqrt(context)
        return (Vit(layers, width, heads, context, vocab),
                torch.randn(batch_size, 3, side, side), torch.randint(vocab, (batch_size,)))
    if name == "bert":
        return (Bert(layers, width, heads, context, vocab),
                torch.randint(vocab, (batch_size, context)), torch.randint(2, (batch_size,)))
    model = (LstmLm(layers, width, vocab) if name == "lstm" else
             (Llama if name == "llama" else Gpt)(layers, width, heads, context, vocab))
    tokens = torch.randint(vocab, (batch_size, context + 1))
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
