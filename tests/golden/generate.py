"""Writes every golden file of this folder. Same versions (requirements.txt), same bytes.

    python -m venv .venv && .venv/bin/pip install -r tests/golden/requirements.txt
    .venv/bin/python tests/golden/generate.py
"""

import warnings

import torch

import counterpart_cases
import decoder_cases
import layer_cases
import llama_cases
import lora_cases
import model_cases
import muon_cases
import op_cases
import pipeline_cases
import power_sgd_cases
import sentencepiece_cases
import tensor_parallel_cases
import tokenizer_cases
import torch_files
import training_cases
import transform_cases

if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*batchmean.*")
    torch.set_num_threads(1)  # sums of more threads may differ in the last bit
    print(f"{op_cases.write_all()} op cases")
    training_cases.write_all()
    model_cases.write_all()
    lora_cases.write_all()
    llama_cases.write_all()
    decoder_cases.write_all()
    power_sgd_cases.write_all()
    tensor_parallel_cases.write_all()
    pipeline_cases.write_all()
    muon_cases.write_all()
    layer_cases.write_all()
    transform_cases.write_all()
    torch_files.write_all()
    counterpart_cases.write_all()
    tokenizer_cases.write_all()
    sentencepiece_cases.write_all()
