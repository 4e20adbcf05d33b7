"""Files of torch.save in torch/, and the tensors in them as torch sees them (torch/NAME.safetensors).

state.pt: a state_dict() of every dtype, with views that share a storage, strides, offsets, a parameter,
an empty and a 0-d tensor; state4.pt: the same by pickle's protocol 4. checkpoint.pt: a training's model
and optimizer with numbers and texts. legacy.pt and legacy_state.pt are in the format before torch 1.6,
libtorch_tensor.pt and libtorch_module.pt are archives of C++'s torch::save. beside.pt has tensors beside all
kinds of other things, object.pt beside an object of a class, huge.pt a tensor that a stride of 0 makes 2^30
times as large as the file has it. adapter_model.bin is lora/adapter_model.safetensors. Refused are call.pt (a
pickle that calls os.system) and complex.pt.
"""

import argparse
import collections
import os
import subprocess
import tempfile
from collections import OrderedDict

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.cpp_extension import include_paths, library_paths

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


def beside():
    w = torch.arange(6.0).view(2, 3)
    parameter = nn.Parameter(w + 1)
    parameter.tag = "decay"
    noted = w + 2
    noted.note = [1, 2]
    foreign = (torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64)
    return {"foreign": {str(dtype).removeprefix("torch."): torch.ones(3, dtype=dtype) for dtype in foreign},
            "negative": torch.ones(2, dtype=torch.complex64).conj().imag, "sparse": torch.eye(3).to_sparse(),
            "set": {"a", "b"}, "frozen": frozenset([1]), "args": argparse.Namespace(lr=1, t=torch.ones(2)),
            "device": torch.device("cpu"), "dtype": torch.float32, "big": 2**100, "bytes": b"abc", "slice": slice(1, 2),
            "deque": collections.deque([1]), "counter": collections.Counter("ab"), "array": numpy.arange(3),
            "complex": 1j, "range": range(3), "keys": {(1, 2): w}, "settings": Settings(),
            "default": collections.defaultdict(list, {"k": w + 3}), "w": w, "parameter": parameter, "noted": noted}


LIBTORCH = """#include <torch/torch.h>
struct Net : torch::nn::Module {
  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  torch::Tensor scale;
  Net() {
    fc = register_module("fc", torch::nn::Linear(3, 2));
    bn = register_module("bn", torch::nn::BatchNorm1d(2));
    scale = register_parameter("scale", torch::arange(4.0));
    torch::NoGradGuard no_grad;
    fc->weight.copy_(torch::arange(6.0).view({2, 3}));
  }
};
int main() {
  torch::save(torch::arange(6.0).view({2, 3}), "libtorch_tensor.pt");
  torch::save(std::make_shared<Net>(), "libtorch_module.pt");
}
"""


def write_libtorch_files():
    with tempfile.TemporaryDirectory() as folder:
        source, program = os.path.join(folder, "save.cpp"), os.path.join(folder, "save")
        with open(source, "w") as file:
            file.write(LIBTORCH)
        library = library_paths()[0]
        subprocess.run(["g++", "-std=c++20", source, "-o", program, *(f"-I{path}" for path in include_paths()), f"-L{library}",
                        "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{library}"], check=True)
        subprocess.run([program], check=True, cwd=FOLDER)


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
    torch.save({**state(), "settings": Settings()}, path("legacy_state.pt"), _use_new_zipfile_serialization=False)
    torch.save(beside(), path("beside.pt"))
    torch.save({"w": torch.ones(1).expand(1 << 30), "v": torch.ones(3)}, path("huge.pt"))
    write_libtorch_files()
    torch.save(load_file(os.path.join(HERE, "lora", "adapter_model.safetensors")), path("adapter_model.bin"))
    torch.save({"args": Settings(), "w": torch.ones(2)}, path("object.pt"))
    torch.save({"w": Calls()}, path("call.pt"))
    torch.save({"w": torch.ones(2, dtype=torch.complex64)}, path("complex.pt"))
    for file in os.listdir(FOLDER):
        os.chmod(path(file), 0o644)


if __name__ == "__main__":
    write_all()
