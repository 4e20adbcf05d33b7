"""Modules with their states and gradients (modules.*), and a whole GPT-2 (gpt2/, gpt2.*).

modules.json: {"name", "module", "options", "inputs": [...], "forward": {...}, "training", "outputs"}.
In modules.safetensors: NAME/state.KEY (f32), NAME/xI, NAME/yI, NAME/dyI, NAME/grad.xI,
NAME/grad.KEY, and NAME/after.KEY for buffers that the call changed. References are float64.

gpt2/ is a folder as transformers writes it (config.json, model.safetensors, random weights).
gpt2.safetensors holds input_ids, logits, grad.KEY of the loss, the token batches of 10 AdamW steps
with clipping, final.KEY and greedy; gpt2.json the loss, the losses and norms of the steps, options.

bert/ and bert.* are the same for a BertForSequenceClassification: input_ids, token_type_ids,
attention_mask (the second row is padded), labels, logits, hidden (the last layer's states), grad.KEY.
"""

import json
import os

import torch
import transformers
from torch import nn

from golden_io import HERE, as_list, largest, save_tensors, significant, write_lines


class Modules:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(30)
        self.tensors = {}
        self.records = []

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def case(self, name, kind, options, inputs, forward=None, training=True, call=None, grad=None, parametrization=None):
        """inputs: f32, i64 or bool tensors. call(module, inputs) overrides module(*inputs, **forward).

        parametrization: {"name": of torch.nn.utils.parametrizations, "options": {...}}.
        """
        module = getattr(nn, kind)(**options).double()
        if parametrization:
            getattr(nn.utils.parametrizations, parametrization["name"])(module, **parametrization["options"])
        with torch.no_grad():
            for key, value in module.state_dict().items():
                if value.is_floating_point():
                    spread = 0.5 + self.normal(*value.shape).abs() if key.endswith("running_var") else 0.4 * self.normal(*value.shape)
                    value.copy_((1.0 + spread if "norm" in key and key.endswith("weight") else spread).float())
                self.tensors[f"{name}/state.{key}"] = value.float() if value.is_floating_point() else value
        self.tensors = {k: v.clone() for k, v in self.tensors.items()}
        module.train(training)
        exact = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
        outputs = [y for y in self.flat((call or (lambda m, *x: m(*x, **(forward or {}))))(module, *exact))]
        record = {"name": name, "module": kind, "options": options, "inputs": len(inputs), "training": training, "outputs": len(outputs), "scales": {}}
        if forward:
            record["forward"] = forward
        if parametrization:
            record["parametrization"] = parametrization
        followed, dys = [], []
        for i, x in enumerate(inputs):
            self.tensors[f"{name}/x{i}"] = x
        for i, y in enumerate(outputs):
            self.tensors[f"{name}/y{i}"] = y.detach()
            record["scales"][f"y{i}"] = significant(largest(y))
            if y.requires_grad:
                dys.append(self.normal(*y.shape))
                followed.append(y)
                self.tensors[f"{name}/dy{i}"] = dys[-1]
        torch.autograd.backward(followed, [dy.double() for dy in dys])
        for i, x in enumerate(exact):
            if x.requires_grad and x.grad is not None:
                self.tensors[f"{name}/grad.x{i}"] = x.grad
                record["scales"][f"grad.x{i}"] = significant(largest(x.grad))
        for key, p in module.named_parameters():
            self.tensors[f"{name}/grad.{key}"] = p.grad
            record["scales"][f"grad.{key}"] = significant(largest(p.grad))
        for key, b in module.named_buffers():
            self.tensors[f"{name}/after.{key}"] = b
        self.records.append(record)

    def flat(self, value):
        for part in as_list(value):
            if isinstance(part, (tuple, list)):
                yield from self.flat(part)
            elif part is not None:
                yield part

    def save(self):
        save_tensors("modules.safetensors", self.tensors)
        write_lines("modules.json", self.records)
        return len(self.records)


def modules():
    m = Modules()
    m.case("linear", "Linear", {"in_features": 5, "out_features": 3}, [m.normal(4, 5)])
    m.case("linear_plain", "Linear", {"in_features": 5, "out_features": 3, "bias": False}, [m.normal(2, 2, 5)])
    ids = torch.tensor([[1, 4, 0], [6, 1, 1]])
    m.case("embedding", "Embedding", {"num_embeddings": 7, "embedding_dim": 4}, [ids])
    m.case("embedding_padding", "Embedding", {"num_embeddings": 7, "embedding_dim": 4, "padding_idx": 1}, [ids])
    m.case("layer_norm", "LayerNorm", {"normalized_shape": [6]}, [m.normal(3, 6)])
    m.case("layer_norm_plain", "LayerNorm", {"normalized_shape": [2, 3], "elementwise_affine": False, "eps": 1e-3}, [m.normal(4, 2, 3)])
    m.case("rms_norm", "RMSNorm", {"normalized_shape": [6], "eps": 1e-6}, [m.normal(3, 6)])
    m.case("group_norm", "GroupNorm", {"num_groups": 2, "num_channels": 4}, [m.normal(2, 4, 3, 2)])
    for dims, shape in ((1, (6, 3)), (1, (4, 3, 5)), (2, (2, 3, 4, 2))):
        for training in (True, False):
            name = f"batch_norm{dims}d_{len(shape)}_{'train' if training else 'eval'}"
            m.case(name, f"BatchNorm{dims}d", {"num_features": 3}, [m.normal(*shape)], training=training)
    m.case("batch_norm_cumulative", "BatchNorm1d", {"num_features": 3, "momentum": None}, [m.normal(5, 3)], forward={"twice": True},
           call=lambda module, x: (module(x), module(2 * x))[1])
    m.case("batch_norm_untracked", "BatchNorm1d", {"num_features": 3, "track_running_stats": False}, [m.normal(5, 3)], training=False)
    m.case("conv1d", "Conv1d", {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1, "groups": 2}, [m.normal(2, 4, 9)])
    m.case("conv2d", "Conv2d", {"in_channels": 3, "out_channels": 4, "kernel_size": [3, 2], "padding": [1, 0], "dilation": 1}, [m.normal(2, 3, 5, 5)])
    m.case("conv2d_plain", "Conv2d", {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "bias": False, "padding": "same"}, [m.normal(1, 2, 4, 4)])

    attention = {"embed_dim": 8, "num_heads": 2}
    q, k, v = m.normal(5, 2, 8), m.normal(4, 2, 8), m.normal(4, 2, 8)
    keys = torch.tensor([[False, False, False, True], [False, True, False, False]])
    m.case("attention", "MultiheadAttention", attention, [q, k, v])
    m.case("attention_batch_first", "MultiheadAttention", {**attention, "batch_first": True}, [x.transpose(0, 1).contiguous() for x in (q, k, v)], forward={"need_weights": False})
    m.case("attention_heads", "MultiheadAttention", attention, [q, k, v], forward={"average_attn_weights": False})
    m.case("attention_plain", "MultiheadAttention", {**attention, "bias": False}, [q, q, q], forward={"need_weights": False})
    m.case("attention_padding", "MultiheadAttention", attention, [q, k, v, keys], forward={"need_weights": True},
           call=lambda module, q, k, v, mask: module(q, k, v, key_padding_mask=mask))
    m.case("attention_mask", "MultiheadAttention", attention, [q, k, v, torch.randn(5, 4, generator=m.generator)], forward={"need_weights": False, "attn_mask": True},
           call=lambda module, q, k, v, mask: module(q, k, v, attn_mask=mask, need_weights=False))
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    m.case("attention_causal", "MultiheadAttention", attention, [q, q, q, causal], forward={"need_weights": False, "attn_mask": True},
           call=lambda module, q, k, v, mask: module(q, k, v, attn_mask=mask, need_weights=False))
    m.case("attention_kdim", "MultiheadAttention", {**attention, "kdim": 6, "vdim": 5}, [q, m.normal(4, 2, 6), m.normal(4, 2, 5)])

    layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0}
    for norm_first in (False, True):
        for activation in ("relu", "gelu"):
            options = {**layer, "norm_first": norm_first, "activation": activation, "batch_first": norm_first}
            tag = f"{'pre' if norm_first else 'post'}_{activation}"
            m.case(f"encoder_{tag}", "TransformerEncoderLayer", options, [m.normal(3, 4, 8)])
            m.case(f"decoder_{tag}", "TransformerDecoderLayer", options, [m.normal(3, 4, 8), m.normal(3, 4, 8)])
    m.case("encoder_causal", "TransformerEncoderLayer", {**layer, "batch_first": True}, [m.normal(2, 5, 8), causal], forward={"src_mask": True},
           call=lambda module, x, mask: module(x, src_mask=mask))

    recurrent = {"input_size": 4, "hidden_size": 3}
    for kind in ("LSTM", "GRU"):
        low = kind.lower()
        m.case(low, kind, recurrent, [m.normal(5, 2, 4)])
        m.case(f"{low}_stacked", kind, {**recurrent, "num_layers": 2, "batch_first": True}, [m.normal(2, 5, 4)])
        m.case(f"{low}_bidirectional", kind, {**recurrent, "num_layers": 2, "bidirectional": True}, [m.normal(4, 2, 4)])
        m.case(f"{low}_plain", kind, {**recurrent, "bias": False}, [m.normal(3, 2, 4)])
    m.case("lstm_state", "LSTM", recurrent, [m.normal(3, 2, 4), m.normal(1, 2, 3), m.normal(1, 2, 3)], call=lambda module, x, h, c: module(x, (h, c)))
    m.case("gru_state", "GRU", recurrent, [m.normal(3, 2, 4), m.normal(1, 2, 3)])
    projected = {**recurrent, "proj_size": 2}
    m.case("lstm_projected", "LSTM", projected, [m.normal(5, 2, 4), m.normal(1, 2, 2), m.normal(1, 2, 3)], call=lambda module, x, h, c: module(x, (h, c)))
    m.case("lstm_projected_stacked", "LSTM", {**projected, "num_layers": 2, "bidirectional": True, "batch_first": True}, [m.normal(2, 4, 4)])
    further_modules(m)
    print(f"modules: {m.save()} cases")


def further_modules(m):
    """At the end, so that the numbers of the cases before stay."""
    m.case("conv_transpose1d", "ConvTranspose1d", {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1, "groups": 2},
           [m.normal(2, 4, 5)])
    m.case("conv_transpose2d", "ConvTranspose2d", {"in_channels": 3, "out_channels": 2, "kernel_size": [3, 2], "stride": [2, 1], "dilation": 1}, [m.normal(2, 3, 3, 4)])
    m.case("conv_transpose2d_plain", "ConvTranspose2d", {"in_channels": 2, "out_channels": 2, "kernel_size": 2, "bias": False, "dilation": 2}, [m.normal(2, 3, 3)])
    m.case("conv_transpose2d_size", "ConvTranspose2d", {"in_channels": 2, "out_channels": 2, "kernel_size": 3, "stride": 2, "padding": 1}, [m.normal(1, 2, 3, 3)],
           forward={"output_size": [6, 5]})
    m.case("conv3d", "Conv3d", {"in_channels": 2, "out_channels": 4, "kernel_size": [2, 3, 2], "padding": [1, 0, 1], "stride": [1, 2, 1], "groups": 2}, [m.normal(2, 2, 3, 5, 4)])
    m.case("conv3d_same", "Conv3d", {"in_channels": 2, "out_channels": 2, "kernel_size": [2, 3, 1], "padding": "same", "bias": False}, [m.normal(1, 2, 3, 4, 3)])
    m.case("instance_norm1d", "InstanceNorm1d", {"num_features": 3, "affine": True}, [m.normal(2, 3, 5)])
    m.case("instance_norm1d_unbatched", "InstanceNorm1d", {"num_features": 3}, [m.normal(3, 5)])
    for training in (True, False):
        m.case(f"instance_norm2d_{'train' if training else 'eval'}", "InstanceNorm2d", {"num_features": 3, "affine": True, "track_running_stats": True, "momentum": 0.3},
               [m.normal(2, 3, 4, 2)], training=training)
    m.case("prelu", "PReLU", {"num_parameters": 3}, [m.normal(2, 3, 4)])
    for mode in ("sum", "mean", "max"):
        m.case(f"embedding_bag_{mode}", "EmbeddingBag", {"num_embeddings": 7, "embedding_dim": 4, "mode": mode, "padding_idx": 2},
               [torch.tensor([1, 4, 2, 6, 1, 1, 0]), torch.tensor([0, 3, 3, 5])])
    rnn = {"input_size": 4, "hidden_size": 3}
    m.case("rnn", "RNN", rnn, [m.normal(5, 2, 4)])
    m.case("rnn_relu", "RNN", {**rnn, "nonlinearity": "relu", "bias": False, "batch_first": True}, [m.normal(2, 4, 4)])
    m.case("rnn_bidirectional", "RNN", {**rnn, "num_layers": 2, "bidirectional": True}, [m.normal(4, 2, 4), m.normal(4, 2, 3)])

    lengths = [2, 5, 3]

    def packed(batch_first):
        def call(module, x, *states):
            together = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)
            state = [] if not states else [states[0] if len(states) == 1 else tuple(states)]
            output, state = module(together, *state)
            padded, sizes = nn.utils.rnn.pad_packed_sequence(output, batch_first=batch_first)
            assert sizes.tolist() == lengths
            return [padded, state]

        return call

    for kind in ("LSTM", "GRU", "RNN"):
        stacked = {**rnn, "num_layers": 2, "bidirectional": True}
        states = [m.normal(4, 3, 3) for _ in range(2 if kind == "LSTM" else 1)]
        m.case(f"{kind.lower()}_packed", kind, stacked, [m.normal(5, 3, 4), *states], forward={"lengths": lengths}, call=packed(False))
        m.case(f"{kind.lower()}_packed_first", kind, {**rnn, "batch_first": True}, [m.normal(3, 5, 4)], forward={"lengths": lengths}, call=packed(True))

    def parametrized(name, kind, options, x, how, training=True, **arguments):
        m.case(name, kind, options, [x], training=training, parametrization={"name": how, "options": arguments})

    parametrized("weight_norm_linear", "Linear", {"in_features": 5, "out_features": 3}, m.normal(4, 5), "weight_norm")
    parametrized("weight_norm_conv", "Conv2d", {"in_channels": 2, "out_channels": 3, "kernel_size": 2}, m.normal(1, 2, 3, 3), "weight_norm", dim=1)
    parametrized("weight_norm_whole", "Linear", {"in_features": 5, "out_features": 3}, m.normal(4, 5), "weight_norm", dim=None)
    for training in (True, False):
        tag = "train" if training else "eval"
        parametrized(f"spectral_norm_{tag}", "Linear", {"in_features": 5, "out_features": 3}, m.normal(4, 5), "spectral_norm", training=training)
    parametrized("spectral_norm_transposed", "ConvTranspose2d", {"in_channels": 2, "out_channels": 3, "kernel_size": 2}, m.normal(1, 2, 3, 3), "spectral_norm", n_power_iterations=2)


GPT2_STEPS = 10


def gpt2():
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(40)
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too: zeros and ones would hide mistakes
            p += 0.05 * torch.randn_like(p)
    folder = os.path.join(HERE, "gpt2")
    model.save_pretrained(folder)
    for stray in set(os.listdir(folder)) - {"config.json", "model.safetensors"}:
        os.remove(os.path.join(folder, stray))
    os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    model = model.double().train()
    names = [name for name, _ in model.named_parameters()]
    tensors = {}

    def loss_of(logits, ids):  # transformers' own goes through float32
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    input_ids = torch.randint(0, 97, (2, 21))
    logits = model(input_ids).logits
    loss = loss_of(logits, input_ids)
    assert abs(loss - model(input_ids, labels=input_ids).loss) < 1e-6
    loss.backward()
    tensors["input_ids"] = input_ids
    tensors["logits"] = logits
    for name, p in model.named_parameters():
        tensors[f"grad.{name}"] = p.grad.float()
    record = {"loss": loss.item()}

    prompt = torch.tensor([[5, 17, 42]])
    model.eval()
    with torch.no_grad():
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
        logits = model(greedy).logits[0].topk(2).values
    assert (logits[:, 0] - logits[:, 1]).min() > 1e-3, "greedy tokens hang on rounding: choose another seed"
    tensors["prompt"], tensors["greedy"] = prompt, greedy
    model.train()

    options = {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": options["weight_decay"]},
         {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}],
        lr=options["lr"], betas=tuple(options["betas"]), eps=options["eps"])
    batches = torch.randint(0, 97, (GPT2_STEPS, 2, 16))
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model(batch).logits, batch)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])))
        optimizer.step()
        losses.append(loss.item())
    tensors["batches"] = batches
    for name, p in model.named_parameters():
        tensors[f"final.{name}"] = p.float()
    save_tensors("gpt2.safetensors", tensors)
    record |= {"steps": options, "decayed": "parameters of 2 dimensions or more", "losses": losses, "norms": norms, "parameters": names}
    with open(os.path.join(HERE, "gpt2.json"), "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    print(f"gpt2: loss {losses[0]:.4f} -> {losses[-1]:.4f}, norms {min(norms):.3f} to {max(norms):.3f}")


def bert():
    config = transformers.BertConfig(vocab_size=83, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72, max_position_embeddings=24,
                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5)
    torch.manual_seed(50)
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for name, p in model.named_parameters():  # biases and norms too: zeros and ones would hide mistakes
            p += 0.05 * torch.randn_like(p)
        model.bert.embeddings.word_embeddings.weight[0] = 0  # the padding row
    folder = os.path.join(HERE, "bert")
    model.save_pretrained(folder)
    for stray in set(os.listdir(folder)) - {"config.json", "model.safetensors"}:
        os.remove(os.path.join(folder, stray))
    os.chmod(os.path.join(folder, "model.safetensors"), 0o644)
    model = model.double().train()
    ids = torch.randint(1, 83, (3, 17))
    types = (torch.arange(17) >= 9).long().expand(3, 17).contiguous()
    mask = torch.ones(3, 17, dtype=torch.long)
    mask[1, 11:] = 0
    ids[mask == 0], types[mask == 0] = 0, 0
    labels = torch.tensor([3, 0, 4])
    output = model(input_ids=ids, token_type_ids=types, attention_mask=mask, output_hidden_states=True)
    loss = nn.functional.cross_entropy(output.logits, labels)
    loss.backward()
    tensors = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels, "logits": output.logits, "hidden": output.hidden_states[-1]}
    for name, p in model.named_parameters():
        tensors[f"grad.{name}"] = p.grad.float()
    save_tensors("bert.safetensors", tensors)
    with open(os.path.join(HERE, "bert.json"), "w") as file:
        json.dump({"loss": loss.item()}, file, indent=1)
        file.write("\n")


def write_all():
    modules()
    gpt2()
    bert()


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
