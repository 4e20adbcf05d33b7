"""Linears in float8 as torchao's emulation makes them: float8.safetensors.

For each recipe of torchao and each dtype, RECIPE.DTYPE/NAME: x, weight, bias, dy, then y, grad.x,
grad.weight, grad.bias, and of each operand that was quantised (input, weight, grad_output,
input_of_weight, weight_of_grad, grad_output_of_weight) its bytes, in the layout of the tensor
[rows, columns], and its scales as f32.

Run with torch and torchao: python3 float8_cases.py. Not a part of generate.py, which needs no torchao.
"""

import torch
from torchao.float8 import float8_linear
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import GemmInputRole

import dataclasses

from golden_io import HERE, SHORT, dtype_name, save_file

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def write_all():
    tensors = {}
    cast = float8_linear.hp_tensor_to_float8_dynamic
    for recipe in RECIPES:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{recipe}.{SHORT[dtype_name(dtype)]}"
            torch.manual_seed(17)
            # Rows and columns of different sizes, so that their scales differ.
            x = (torch.randn(48, 32) * torch.exp(torch.randn(48, 1)) * torch.exp(torch.randn(32))).to(dtype)
            weight = (torch.randn(64, 32) * 0.2 * torch.exp(torch.randn(64, 1))).to(dtype)
            bias = torch.randn(64).to(dtype)
            dy = (torch.randn(48, 64) * 1e-4 * torch.exp(torch.randn(64))).to(dtype)
            config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
            layer = Float8Linear.from_float(torch.nn.Linear(32, 64).to(dtype), config=config)
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)

            seen = []

            def recorded(tensor, *args, **kwargs):
                result = cast(tensor, *args, **kwargs)
                seen.append((kwargs["gemm_input_role"], result))
                return result

            float8_linear.hp_tensor_to_float8_dynamic = recorded
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.backward(dy)
            float8_linear.hp_tensor_to_float8_dynamic = cast

            counts = {}
            for role, quantised in seen:
                first, second = {
                    GemmInputRole.INPUT: ("input", "input_of_weight"),
                    GemmInputRole.WEIGHT: ("weight", "weight_of_grad"),
                    GemmInputRole.GRAD_OUTPUT: ("grad_output", "grad_output_of_weight"),
                }[role]
                operand = first if counts.setdefault(role, 0) == 0 else second
                counts[role] += 1
                data, scale = quantised._data, quantised._scale
                if role is GemmInputRole.WEIGHT:  # it was given transposed
                    data, scale = data.t(), scale.t() if scale.dim() == 2 else scale
                tensors[f"{name}/{operand}.bytes"] = data.contiguous().view(torch.uint8)
                tensors[f"{name}/{operand}.scale"] = scale.float().reshape(-1).contiguous()
            for key, value in {"x": x, "weight": weight, "bias": bias, "dy": dy, "y": y.detach(),
                               "grad.x": leaf.grad, "grad.weight": layer.weight.grad,
                               "grad.bias": layer.bias.grad}.items():
                tensors[f"{name}/{key}"] = value.detach().contiguous()
    save_file(tensors, f"{HERE}/float8.safetensors", {"torchao": "float8 training, emulated"})


if __name__ == "__main__":
    write_all()
