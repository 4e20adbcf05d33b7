import math

import torch
from torch import nn


class Solution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(2, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x, t):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(torch.cat([x, t], 1))))))


DIFFUSION = 0.1


def residual(u, x, t):
    def derivative(of, by):
        return torch.autograd.grad(of.sum(), [by], create_graph=True)[0]

    value = u(x, t)
    u_t = derivative(value, t)
    u_xx = derivative(derivative(value, x), x)
    return u_t - DIFFUSION * u_xx


def main():
    torch.manual_seed(1)
    u = Solution(24)
    optimizer = torch.optim.Adam(u.parameters(), lr=5e-3)
    steps = 1500
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=1e-5)

    def inside(count):
        return torch.rand(count, 1).requires_grad_()

    for step in range(1, steps + 1):
        equation = residual(u, inside(64), inside(64)).square().mean()
        x, t, zero = torch.rand(32, 1), torch.rand(32, 1), torch.zeros(32, 1)
        beginning = (u(x, zero) - torch.sin(x * math.pi)).square().mean()
        edges = u(zero, t).square().mean() + u(zero + 1, t).square().mean()
        loss = equation + 10 * (beginning + edges)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 500 == 0:
            print(f"step {step:4}  loss {loss.item():.2e}")
    with torch.no_grad():
        x, t = torch.rand(1000, 1), torch.rand(1000, 1)
        exact = torch.exp(t * (-DIFFUSION * math.pi**2)) * torch.sin(x * math.pi)
        error = (u(x, t) - exact).abs().max().item()
    print(f"largest error {error:.4f}")
    return 0 if error < 0.03 else 1


if __name__ == "__main__":
    raise SystemExit(main())
