"""Files of torch.save in torch/, and the tensors in them as torch sees them (torch/NAME.safetensors).

state.pt: a state_dict() of every dtype, with views that share a storage, strides, offsets, a parameter,
an empty and a 0-d tensor; state4.pt: the same by pickle's protocol 4. checkpoint.pt: a training's model
and optimizer with numbers and texts. Refused are legacy.pt (the format before torch 1.6), object.pt (an
object of a class), call.pt (a pickle that calls os.system), complex.pt.
"""

import os
from collections import OrderedDict

import torch
from safetensors.torch import save_file
from torch import nn

from golden_io import HERE

FOLDER = os.path.join(HERE, "torch")


class Settings:
    def __init__(self):
        self.depth = 3


class Calls:
    def __reduce__(self):
        return os.system, ("true",)


def state():
    torch.manual_seed(80)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    values = OrderedDict(model.state_dict())
    values._metadata = model.state_dict()._metadata
    base = torch.randn(4, 6)
    values["base"] = base
    values["same"] = base
    values["transposed"] = base.t()
    values["row"] = base[2]
    values["part"] = base[1:3, ::2]
    values["expanded"] = torch.randn(3, 1).expand(3, 4)
    values["parameter"] = nn.Parameter(torch.randn(2, 2))
    values["number"] = torch.tensor(2.5)
    values["empty"] = torch.zeros(0, 5)
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        values[str(dtype).removeprefix("torch.")] = torch.randn(5).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        values[str(dtype).removeprefix("torch.")] = torch.tensor([1, 0, 7, 100], dtype=dtype)
    values["bool"] = torch.tensor([True, False, True])
    return values


def checkpoint():
    torch.manual_seed(81)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "loss": -0.5, "big": 1 << 40,
            "name": "a text", "best": None, "done": False, "shape": torch.Size([2, 3]), "history": [1, (2.5, [torch.ones(2)])]}


def leaves(value, name=""):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{name}.{key}" if name else str(key))


def write_all():
    os.makedirs(FOLDER, exist_ok=True)
    path = lambda name: os.path.join(FOLDER, name)
    torch.save(state(), path("state.pt"))
    torch.save(state(), path("state4.pt"), pickle_protocol=4)
    torch.save(checkpoint(), path("checkpoint.pt"))
    for name, value in (("state", state()), ("checkpoint", checkpoint())):
        save_file({key: x.detach().contiguous().clone() for key, x in leaves(value)}, path(f"{name}.safetensors"))
    torch.save({"w": torch.ones(2)}, path("legacy.pt"), _use_new_zipfile_serialization=False)
    torch.save({"args": Settings(), "w": torch.ones(2)}, path("object.pt"))
    torch.save({"w": Calls()}, path("call.pt"))
    torch.save({"w": torch.ones(2, dtype=torch.complex64)}, path("complex.pt"))
    for file in os.listdir(FOLDER):
        os.chmod(path(file), 0o644)


if __name__ == "__main__":
    write_all()
