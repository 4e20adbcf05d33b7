import torch
from torch import nn


class Perceptron(nn.Module):
    def __init__(self, inputs, width, outputs):
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x):
        silu = nn.functional.silu
        return self.last(silu(self.second(silu(self.first(x)))))


BATCH, NOISE = 128, 2


def true_points():
    return torch.cat([torch.randn(BATCH, 1) * 1.0, torch.randn(BATCH, 1) * 0.5], 1) + 2


def slopes_between(critic, a, b):
    part = torch.rand(a.size(0), 1)
    between = (a * part + b * (1 - part)).detach().requires_grad_()
    slope = torch.autograd.grad(critic(between).sum(), [between], create_graph=True)[0]
    return torch.sqrt(slope.square().sum(1) + 1e-12)


def main():
    torch.manual_seed(1)
    generator, critic = Perceptron(NOISE, 48, 2), Perceptron(2, 48, 1)
    options = dict(lr=1e-3, betas=(0.5, 0.9))
    generator_steps = torch.optim.Adam(generator.parameters(), **options)
    critic_steps = torch.optim.Adam(critic.parameters(), **options)

    def make():
        return generator(torch.randn(BATCH, NOISE))

    for step in range(1500):
        for _ in range(5):
            real = true_points()
            with torch.no_grad():
                made = make()
            distance = critic(real).mean() - critic(made).mean()
            penalty = (slopes_between(critic, real, made) - 1).square().mean()
            (10 * penalty - distance).backward()
            critic_steps.step()
            critic_steps.zero_grad()
        (-critic(make()).mean()).backward()
        generator_steps.step()
        generator_steps.zero_grad()
        critic_steps.zero_grad()
    slope = slopes_between(critic, true_points(), make()).mean().item()
    with torch.no_grad():
        made = generator(torch.randn(2000, NOISE))
        centre = made.mean(0).tolist()
        width = (made - made.mean(0)).square().mean(0).sqrt().tolist()
    print(f"made points: {centre[0]:.2f} +- {width[0]:.2f}, {centre[1]:.2f} +- {width[1]:.2f}; "
          f"the critic's slope {slope:.2f}")

    def near(value, expected):
        return abs(value - expected) < 0.3

    right = (near(centre[0], 2) and near(centre[1], 2) and near(width[0], 1)
             and near(width[1], 0.5) and near(slope, 1))
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
