import argparse

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text, state):
        output, state = self.lstm(self.table(text), state)
        return self.head(output), state


def make_text(words):
    return b"Abbbbb" * words


def train(text, rows=16, window=4, epochs=24, width=32, carry=True):
    torch.manual_seed(2)
    model = LanguageModel(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    length = len(text) // rows
    numbers = torch.tensor(list(text[:length * rows])).view(rows, length)
    mean = 0
    for _ in range(epochs):
        state = None
        mean, windows = 0, 0
        for at in range(0, length - window, window):
            if not carry:
                state = None
            logits, state = model(numbers[:, at:at + window], state)
            targets = numbers[:, at + 1:at + window + 1].reshape(-1)
            loss = nn.functional.cross_entropy(logits.reshape(-1, 256), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            state = tuple(part.detach() for part in state)
            mean += loss.item()
            windows += 1
        mean /= windows
    return mean


def main():
    parser = argparse.ArgumentParser(description="A language model with an LSTM.")
    parser.add_argument("--data", default="", help="a text")
    parser.add_argument("--window", type=int, default=4, help="bytes the gradient goes through")
    parser.add_argument("--epochs", type=int, default=24, help="times through the text")
    parser.add_argument("--width", type=int, default=32, help="of the state")
    options = vars(parser.parse_args())
    file = options.pop("data")
    if file:
        with open(file, "rb") as text:
            print(f"loss {train(text.read(), **options):.4f}")
        return 0
    text = make_text(960)
    carried = train(text, **options)
    forgotten = train(text, carry=False, **options)
    print(f"loss with the state carried on {carried:.3f}, without {forgotten:.3f}")
    return 0 if carried < 0.03 and forgotten > 0.1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
