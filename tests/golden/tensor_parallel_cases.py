"""Losses and gradient norms of torch's tensor parallelism on two processes, for
tests/parallel/test_tensor_parallel_sharded.cpp: with sequence parallelism of a perceptron behind a
norm, and without of transformers' GPT-2, Llama and BERT in the folders beside this file.
"""

import json
import os
import pathlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                               SequenceParallel, parallelize_module)
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

WIDTH, INNER, STEPS, RANKS = 8, 16, 10, 2


def numbers(shape, salt):
    count = 1
    for size in shape:
        count *= size
    return torch.tensor([((i * 37 + salt * 11) % 23 - 11) / 16 for i in range(count)],
                        dtype=torch.float64).reshape(shape)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.fc = torch.nn.Linear(WIDTH, INNER, dtype=torch.float64)
        self.proj = torch.nn.Linear(INNER, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for salt, parameter in enumerate(self.parameters(), 1):
                parameter.copy_(numbers(tuple(parameter.shape), salt))

    def forward(self, x):
        return self.proj(torch.nn.functional.gelu(self.fc(self.norm(x))))


def perceptron(mesh):
    model = Block()
    parallelize_module(model, mesh, {
        "norm": SequenceParallel(),
        "fc": ColwiseParallel(input_layouts=Shard(1)),
        "proj": RowwiseParallel(output_layouts=Replicate()),
    })
    return model, lambda step: model(numbers((2, 4, WIDTH), 100 + step)).square().mean()


FOLDERS = pathlib.Path(__file__).parent
ROWS = RowwiseParallel(input_layouts=Replicate())
CLASSES = ColwiseParallel(output_layouts=Replicate())


def tokens(words, step):  # [2, 9]
    return torch.tensor([(i * 37 + step * 11) % words for i in range(18)]).reshape(2, 9)


def loss_of_words(model, step):
    words = tokens(model.config.vocab_size, step)
    logits = model(words[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def linear_of(conv, order=None):
    weight, bias = conv.weight.detach().t(), conv.bias.detach()
    if order is not None:
        weight, bias = weight[order], bias[order]
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return linear


def gpt2(mesh):
    model = GPT2LMHeadModel.from_pretrained(FOLDERS / "gpt2", dtype=torch.float64)
    width = model.config.n_embd
    # Query, key and value lie side by side: a rank's own ones have to be one chunk.
    order = torch.arange(3 * width).reshape(3, RANKS, -1).transpose(0, 1).flatten()
    for block in model.transformer.h:
        block.attn.c_attn = linear_of(block.attn.c_attn, order)
        block.attn.split_size = width // RANKS
        for holder, name in ((block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            setattr(holder, name, linear_of(getattr(holder, name)))
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    parallelize_module(model, mesh, {
        "transformer.wte": ROWS,
        "transformer.h.*.attn.c_attn": ColwiseParallel(),
        "transformer.h.*.attn.c_proj": RowwiseParallel(),
        "transformer.h.*.mlp.c_fc": ColwiseParallel(),
        "transformer.h.*.mlp.c_proj": RowwiseParallel(),
        "lm_head": CLASSES,
    })
    model.lm_head.weight = model.transformer.wte.weight
    return model, lambda step: loss_of_words(model, step)


def llama(mesh):
    model = LlamaForCausalLM.from_pretrained(FOLDERS / "llama", dtype=torch.float64)
    block = "model.layers.*."
    plan = {"model.embed_tokens": ROWS, "lm_head": CLASSES}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj",
                 "mlp.up_proj"):
        plan[block + name] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[block + name] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    return model, lambda step: loss_of_words(model, step)


def bert(mesh):
    model = BertForSequenceClassification.from_pretrained(FOLDERS / "bert", dtype=torch.float64)
    block = "bert.encoder.layer.*."
    plan = {"bert.embeddings.word_embeddings": ROWS}
    for name in ("attention.self.query", "attention.self.key", "attention.self.value",
                 "intermediate.dense"):
        plan[block + name] = ColwiseParallel()
    for name in ("attention.output.dense", "output.dense"):
        plan[block + name] = RowwiseParallel()
    parallelize_module(model, mesh, plan)

    def loss(step):
        words = tokens(model.config.vocab_size, step)
        return torch.nn.functional.cross_entropy(model(words).logits, words[:, 0] % 5)

    return model, loss


def clip(model, most):
    """clip_grad_norm_, which takes no mixture of DTensors and tensors."""
    squares = 0.0
    for parameter in model.parameters():
        whole = parameter.grad
        if whole is None:
            continue
        squares += (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).square().sum()
    norm = squares.sqrt()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0).item())
    return norm.item()


def trained(make, mesh, most):
    model, loss_of = make(mesh)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        loss = loss_of(step)
        loss.backward()
        norms.append(clip(model, most))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def write(rank, name, port, cases_of):
    """Writes cases_of(rank) of rank 0 to a file beside this one."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    told = {"torch": torch.__version__, **cases_of(rank)}
    if rank == 0:
        with open(pathlib.Path(__file__).parent / name, "w") as file:
            json.dump(told, file, indent=1)
            file.write("\n")
    dist.destroy_process_group()


def cases_of(rank):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    told = trained(perceptron, mesh, 0.5)
    for make in (gpt2, llama, bert):
        told[make.__name__] = trained(make, mesh, 1.0)
    return told


def write_all():
    mp.spawn(write, args=("tensor_parallel.json", 29533, cases_of), nprocs=RANKS)


if __name__ == "__main__":
    write_all()
