import csv
import os
import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Rows(Dataset):
    def __init__(self, file):
        with open(file, newline="") as table:
            self.table = list(csv.DictReader(table))
        self.columns = [name for name in self.table[0] if name != "label"]

    def __len__(self):
        return len(self.table)

    def __getitem__(self, index):
        row = self.table[index]
        values = [float(row[name]) for name in self.columns]
        return torch.tensor(values), torch.tensor(int(row["label"]))


class Network(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.hidden = nn.Linear(features, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(nn.functional.gelu(self.hidden(x)))


class Progress:
    def __init__(self):
        self.epoch = self.batch = 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def train(file, epochs):
    set_seed(1)
    accelerator = Accelerator(project_config=ProjectConfiguration(
        project_dir="out/own_data", automatic_checkpoint_naming=True, total_limit=2))
    rows = Rows(file)
    known = len(rows) * 9 // 10
    parts = random_split(rows, [known, len(rows) - known], torch.Generator().manual_seed(1))
    loader = DataLoader(parts[0], batch_size=16, shuffle=True, num_workers=1)
    validation = DataLoader(parts[1], batch_size=64)
    model = Network(len(rows.columns))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, validation = accelerator.prepare(model, optimizer, loader, validation)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    stops = []
    signal.signal(signal.SIGTERM, lambda *_: stops.append(True))

    if os.path.isdir("out/own_data/checkpoints") and os.listdir("out/own_data/checkpoints"):
        accelerator.load_state()
        accelerator.print("going on from epoch", progress.epoch)
    while progress.epoch < epochs:
        rest = accelerator.skip_first_batches(loader, progress.batch)
        for features, label in rest:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), label)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            progress.batch += 1
            if stops:
                accelerator.save_state()
                return
        right = seen = 0
        for features, label in validation:
            with torch.no_grad():
                guesses, truth = accelerator.gather_for_metrics((model(features).argmax(-1), label))
            right += (guesses == truth).sum().item()
            seen += len(truth)
        accelerator.print(f"epoch {progress.epoch}: {right / seen} of {seen} rows right")
        progress.epoch, progress.batch = progress.epoch + 1, 0
        accelerator.save_state()
    accelerator.save_model(model, "out/own_data/model")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("own_data: give it a table and a number of epochs")
    train(sys.argv[1], int(sys.argv[2]))
