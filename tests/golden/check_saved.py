"""What nn::models::Llama saves, read by transformers and by the gguf package. First

    mkdir copies && TESSERA_DECODER_COPIES=copies test_decoders --gtest_filter='*AFolderWrittenHere*'

and then `python check_saved.py copies`: each folder must give transformers the logits of the folder in decoders/ that
it was read from, and each GGUF file the tensors of that folder. Exit code 1 otherwise.
"""

import os
import sys
import warnings

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize

from decoder_cases import HERE, configs


def logits_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    ids = torch.randint(0, 61, (2, 22), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return model(ids).logits, model


def check_gguf(path, model):
    reader = GGUFReader(path)
    tensors = {t.name: torch.from_numpy(np.array(dequantize(t.data, t.tensor_type))).double() for t in reader.tensors}
    state = model.state_dict()
    plus = 1 if model.config.model_type.startswith("gemma") else 0
    worst = 0.0
    for name, given in [("token_embd.weight", state["model.embed_tokens.weight"]), ("output_norm.weight", state["model.norm.weight"] + plus),
                        ("blk.1.ffn_down.weight", state["model.layers.1.mlp.down_proj.weight"]),
                        ("blk.1.attn_output.weight", state["model.layers.1.self_attn.o_proj.weight"])]:
        error = (tensors[name].reshape(given.shape) - given).abs().max().item() / given.abs().max().item()
        worst = max(worst, error)
    return worst, len(tensors)


def main(copies):
    wrong = 0
    for name, _ in configs():
        expected, model = logits_of(os.path.join(HERE, "decoders", name))
        found, _ = logits_of(os.path.join(copies, name))
        difference = (found - expected).abs().max().item()
        line = f"{name}: logits differ by {difference:.1e}"
        wrong += difference > 1e-12
        for ending, bound in ((".gguf", 1e-7), (".q8_0.gguf", 1e-2)):
            path = os.path.join(copies, name + ending)
            if os.path.exists(path):
                error, count = check_gguf(path, model)
                line += f"; {ending}: {count} tensors, {error:.1e}"
                wrong += error > bound
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    sys.exit(main(sys.argv[1]))
