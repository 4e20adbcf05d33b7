"""Writes tensor_methods.inc: which ops of op_runner are methods of torch.Tensor.

    op_runner --list | python3 tests/golden/tensor_methods.py > tests/golden/tensor_methods.inc
"""
import sys

import torch

print(f"// The ops of op_runner that torch.Tensor {torch.__version__.split('+')[0]} has as methods, and those that it "
      "has not: made\n// by tensor_methods.py.")
for name in sorted(line.strip() for line in sys.stdin if line.strip()):
    print(f"{'METHOD' if callable(getattr(torch.Tensor, name, None)) else 'FUNCTION'}({name})")
