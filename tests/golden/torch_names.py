"""Writes torch_names.json: the names that a user of PyTorch knows, for the page docs/from-pytorch.md.

    python3 tests/golden/torch_names.py > tests/golden/torch_names.json

Functions and methods without a documentation of their own, and those of quantised, sparse and named tensors, of other
backends and of the machinery of torch.compile are left out.
"""
import inspect
import json
import re

import torch
import torch.nn.functional as functional
from torch.optim import lr_scheduler

LEFT_OUT = re.compile(
    r"^(_.*|sym_.*|.*_symint|native_.*|cudnn_.*|miopen_.*|mkldnn_.*|fbgemm_.*|quantize.*|dequantize|q_.*|int_repr|"
    r".*quantized.*|fake_quantize.*|rename_?|refine_names|align_.*|names|sparse_.*|to_sparse.*|to_mkldnn|to_padded.*|"
    r"is_quantized|qscheme|set_.*|get_(?!device$).*|compiled_with.*|are_deterministic.*|is_deterministic.*|use_.*|"
    r"handle_torch.*|has_torch.*|boolean_dispatch|assert_int.*|cond|while_loop|unify.*|vitals.*|read_vitals|"
    r"import_ir.*|parse_.*|merge_type.*|fork|wait|autocast_.*|clear_autocast.*|is_autocast.*|choose_qparams.*|"
    r"init_num.*|typename|segment_reduce|.*coalesced?_?|ccol_indices|row_indices|col_indices|crow_indices|indices|"
    r"values|is_vulkan.*|is_metal.*|.*_backward.*|reinforce|has_names|share_memory_|is_shared|pin_memory|"
    r"as_subclass|map_|map2_|apply_|storage.*|untyped_storage|typed_storage|ipu|xpu|mtia|hpu|module_load|"
    r"dim_order|data_ptr|record_stream|resize.*|smm|sspaddmm|hspmm|sparse.*|binomial|.*_copy|scaled_.*mm_?|"
    r"grouped_mm|obj|compile|profiler.*|initial_seed|seed|thread_safe.*|layout|get_.*|error.*|conv_tbc|Optional)$")


def documented(space, name, full):
    value = getattr(space, name)
    if LEFT_OUT.match(name) or not callable(value) or inspect.isclass(value) or inspect.ismodule(value):
        return False
    text = inspect.getdoc(value) or ""
    return bool(re.search(rf"\b{re.escape(name)}\(", text)) or (full and bool(text))


def functions(space, full=False):
    return sorted(name for name in dir(space) if not name.startswith("_") and documented(space, name, full))


def classes(space, base, leave_out=()):
    return sorted(name for name in dir(space) if inspect.isclass(getattr(space, name))
                  and issubclass(getattr(space, name), base) and getattr(space, name) is not base
                  and not name.startswith(("_", "Lazy")) and name not in leave_out)


names = {
    "version": torch.__version__.split("+")[0],
    "torch": functions(torch),
    "torch.Tensor": functions(torch.Tensor),
    "torch.nn": classes(torch.nn, torch.nn.Module, ("Container", "NLLLoss2d", "RNNBase", "RNNCellBase")),
    "torch.nn.functional": functions(functional, full=True),
    "torch.optim": classes(torch.optim, torch.optim.Optimizer),
    "torch.optim.lr_scheduler": classes(lr_scheduler, lr_scheduler.LRScheduler),
}
print(json.dumps(names, indent=1))
