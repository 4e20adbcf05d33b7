import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torchvision.datasets.mnist import read_image_file, read_label_file


@dataclass
class VitOptions:
    image: int = 28
    patch: int = 7
    channels: int = 1
    width: int = 64
    heads: int = 4
    layers: int = 2
    classes: int = 10


class VisionTransformer(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.options = o
        self.patches = nn.Conv2d(o.channels, o.width, o.patch, stride=o.patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, o.width))
        self.places = nn.Parameter(torch.empty(1, (o.image // o.patch) ** 2 + 1, o.width))
        self.layers = nn.ModuleList()
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, o.classes)
        for _ in range(o.layers):
            self.layers.append(
                nn.TransformerEncoderLayer(o.width, o.heads, dim_feedforward=2 * o.width,
                                           dropout=0, activation="gelu", batch_first=True,
                                           norm_first=True))
        nn.init.zeros_(self.class_token)
        nn.init.normal_(self.places, 0, 0.5)

    def forward(self, images):
        B = images.size(0)
        tokens = self.patches(images).flatten(2, 3).transpose(1, 2)
        x = torch.cat([self.class_token.expand(B, 1, self.options.width), tokens], 1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).select(1, 0))


def make_images(count):
    pixels = torch.randn(count, 1, 16, 16) * 0.5
    labels, rows = torch.randint(0, 4, (count,)), torch.randint(0, 4, (count,))
    columns, lines = labels.tolist(), rows.tolist()
    for i in range(count):
        pixels[i, :, 4 * lines[i]:4 * lines[i] + 4, 4 * columns[i]:4 * columns[i] + 4] += 1.5
    return pixels, labels


def share_right(model, pixels, labels):
    with torch.no_grad():
        model.eval()
        right = model(pixels).argmax(-1).eq(labels)
        model.train()
        return right.float().mean().item()


def main():
    parser = argparse.ArgumentParser(description="A vision transformer.")
    parser.add_argument("--data", default="", help="folder with the t10k files of MNIST")
    parser.add_argument("--steps", type=int, default=300, help="batches of 32 images")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    options = VitOptions()
    if not arguments.data:
        train, test = make_images(2048), make_images(256)
        options = VitOptions(image=16, patch=4, width=32, classes=4)
    else:
        pixels = read_image_file(arguments.data + "/t10k-images-idx3-ubyte").float()[:, None] / 255
        labels = read_label_file(arguments.data + "/t10k-labels-idx1-ubyte").long()
        train = pixels[:9000], labels[:9000]
        test = pixels[9000:], labels[9000:]
    model = VisionTransformer(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, arguments.steps, pct_start=0.1)
    for step in range(1, arguments.steps + 1):
        chosen = torch.randint(0, len(train[1]), (32,))
        loss = nn.functional.cross_entropy(model(train[0][chosen]), train[1][chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    right = share_right(model, *test)
    print(f"{100 * right:.1f}% of unseen images right")
    return 0 if right >= (0.85 if arguments.data else 0.95) else 1


if __name__ == "__main__":
    raise SystemExit(main())
