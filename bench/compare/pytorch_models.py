"""GPT-2 and BERT in plain PyTorch, as examples/gpt2 and examples/bert have them."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class GptBlock(nn.Module):
    """Pre-LayerNorm, biases, tanh GELU."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
                   for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Learned positions, a head tied to the token embedding; returns the mean loss."""

    def __init__(self, layers, width, heads, context, vocab):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
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
