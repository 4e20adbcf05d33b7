"""Weights in 8 and 4 bits as bitsandbytes makes them on the CPU: packed.safetensors.

dynamic_map and codes.nf4, codes.fp4: the tables. For each WEIGHT (weight.WEIGHT) and FORMAT
(int8; nf4 and fp4 with blocks of 64, nf4_128 of 128), WEIGHT/FORMAT.NAME: values (signed bytes are
stored as they lie in memory), absmax, and what products read of them, f32 and bf16: of 4 bits by the
form for all devices, as the library for AVX-512 takes a wrong scale where a block reaches over the end
of a row (else they are equal, up to the sign of zeros, which is checked here). WEIGHT/FORMAT_nested.NAME
with double quantisation: values are those of FORMAT; scales (bytes), absmax of the scales, offset, f32.
numbers and numbers.bytes, numbers.absmax: the dynamic map on numbers of all sizes.

Run with torch and bitsandbytes 0.50: python3 packed_cases.py. Not a part of generate.py, which needs no
bitsandbytes.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what is compiled may be rounded otherwise

import bitsandbytes.functional as F
import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

from golden_io import save_tensors

FORMATS = {"nf4": ("nf4", 64), "fp4": ("fp4", 64), "nf4_128": ("nf4", 128)}


def weights():
    torch.manual_seed(23)
    inf = float("inf")
    special = torch.randn(4, 64)
    special[0, 3], special[0, 9] = inf, -inf
    special[1, 5] = float("nan")
    special[2] = 1e-42  # under the smallest normal number
    special[3, :32] *= 1e-37
    odd = torch.randn(7, 37)
    odd[6, -3:] = torch.tensor([0.0, -0.0, 2.0])
    ties = torch.stack([(F.get_4bit_type(name, device="cpu").sort().values) for name in ("nf4", "fp4")])
    ties = torch.cat([ties, (ties[:, 1:] + ties[:, :-1]) / 2, torch.zeros(2, 33)], 1)
    return {
        "random": torch.randn(40, 56) * torch.exp(torch.randn(40, 1)),
        "random_bf16": torch.randn(8, 96).bfloat16(),
        "random_f16": torch.randn(8, 64).half(),
        "constant": torch.full((3, 64), -0.3),
        "zero": torch.zeros(2, 64),
        "zero_odd": torch.zeros(1, 5),
        "special": special,
        "special_odd": special[:, :33].contiguous(),
        "odd": odd,
        "one": torch.tensor([[0.25]]),
        "ties": ties,
        "halves": (torch.arange(-127, 128) / 2)[None].repeat(2, 1) * torch.tensor([[2.0], [1.0]]),
    }


def read(values, state, dtype):
    absmax = state.absmax
    if state.nested:
        absmax = F.dequantize_blockwise(absmax, state.state2) + state.offset
    numbers = _dequantize_4bit_compute(values.reshape(-1), absmax, state.code, state.blocksize, state.shape, dtype)
    state.dtype = dtype
    if state.shape[-1] % state.blocksize == 0:
        assert torch.equal(F.dequantize_4bit(values, state).nan_to_num(7), numbers.nan_to_num(7))
    return numbers


def write_all():
    table = F.create_dynamic_map()
    tensors = {"dynamic_map": table}
    for name in ("nf4", "fp4"):
        tensors[f"codes.{name}"] = F.get_4bit_type(name, device="cpu")
    for name, weight in weights().items():
        tensors[f"weight.{name}"] = weight
        bytes_, absmax, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight)
        prefix = f"{name}/int8"
        tensors[f"{prefix}.values"], tensors[f"{prefix}.absmax"] = bytes_.view(torch.uint8), absmax
        for short, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            # As MatMul8bitFp has it.
            tensors[f"{prefix}.{short}"] = bytes_.to(dtype).mul_(absmax.unsqueeze(1).mul(1.0 / 127.0))
        for format_, (kind, block) in FORMATS.items():
            prefix = f"{name}/{format_}"
            values, state = F.quantize_4bit(weight, blocksize=block, quant_type=kind)
            tensors[f"{prefix}.values"], tensors[f"{prefix}.absmax"] = values, state.absmax
            for short, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
                tensors[f"{prefix}.{short}"] = read(values, state, dtype)
            if name.startswith("special"):
                continue  # a mean of infinity
            values, state = F.quantize_4bit(weight, blocksize=block, quant_type=kind, compress_statistics=True)
            prefix += "_nested"
            tensors[f"{prefix}.scales"], tensors[f"{prefix}.absmax"] = state.absmax, state.state2.absmax
            tensors[f"{prefix}.offset"] = state.offset
            tensors[f"{prefix}.f32"] = read(values, state, torch.float32)
    numbers = torch.cat([
        torch.randn(1000) * torch.exp(3 * torch.randn(1000)), torch.zeros(256 - 1000 % 256), torch.zeros(256),
        torch.tensor([1.0, float("inf"), -float("inf"), 2.0]), torch.linspace(-1, 1, 252),
        torch.tensor([1e-42, -1e-42, 5e-43, 0.0]), torch.zeros(252),
        torch.tensor([1.0, float("nan"), -2.0, 0.0]), torch.linspace(-2e-4, 2e-4, 252),
        torch.cat([table, table[1:] / 2 + table[:-1] / 2])])
    bytes_, state = F.quantize_blockwise(numbers, blocksize=256)
    tensors["numbers"], tensors["numbers.bytes"], tensors["numbers.absmax"] = numbers, bytes_, state.absmax
    save_tensors("packed.safetensors", {key: value.contiguous().clone() for key, value in tensors.items()})
    print(f"packed weights: {len(tensors)} tensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
