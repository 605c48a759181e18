"""End-to-end tuning: group scales and norm weights are trained so that the quantized model's predictions come
back to the original's. Codes stay as the solver chose them, so the result is the same plain format.

Loss is KL(original || quantized) over the full vocabulary, the quantity that evaluation reports: cross-entropy on
the text would fit the data instead of the model (its perplexity falls while KL grows). The step with the smallest
KL on held-out windows is kept, and nothing is kept that does not lower it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from quantkit.qweight import QuantWeight, round_scale

# Positions whose logits are alive at once: the vocabulary makes them the largest tensors of a step.
HEAD_ROWS = 128


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """steps: optimizer steps of ``batch`` windows each. lr: peak relative change of a scale a step (Adam), with a
    short warm-up and a cosine to zero. held: windows kept out of training to choose the step by. every: steps
    between looks at them."""

    steps: int = 60
    lr: float = 2e-3
    batch: int = 1
    held: int = 4
    every: int = 10
    seed: int = 0


class _Scaled(torch.autograd.Function):
    """``x W^T`` with W = centred * scale[group]; the float weight is made twice rather than kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, layer: ScaledLinear) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, scale)
        ctx.layer = layer
        return x @ layer.weight_from(scale).T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, None]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        layer: ScaledLinear = ctx.layer
        flat_grad, flat_x = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        by_weight = flat_grad.T @ flat_x
        by_scale = layer.sum_groups(by_weight.mul_(layer.centred))
        by_x = grad @ layer.weight_from(scale) if ctx.needs_input_grad[0] else None
        return by_x, by_scale, None


class ScaledLinear(nn.Module):
    """A linear with frozen codes and trainable scales: ``scale = start * (1 + theta)``, theta ``[out, groups]``."""

    def __init__(self, weight: QuantWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.source = weight
        self.index = weight.columns_to_groups()
        zero = weight.scheme.midpoint if weight.zero is None else weight.zero[:, self.index].short()
        centred = weight.codes.short() - zero
        # 4-bit codes fit a byte with room; 8-bit ones minus a zero point do not
        self.centred = centred.to(torch.int8) if weight.scheme.bits <= 4 else centred
        self.start = weight.scale.float()
        self.theta = nn.Parameter(torch.zeros_like(self.start))
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)
        group = weight.scheme.group or weight.shape[1]
        self._even = group if weight.order is None and weight.shape[1] % group == 0 else 0

    def weight_from(self, scale: Tensor) -> Tensor:
        """float32 ``[out, in]``."""
        if self._even:
            rows = self.centred.shape[0]
            return (self.centred.view(rows, -1, self._even) * scale[:, :, None]).view(rows, -1)
        return self.centred * scale[:, self.index]

    def sum_groups(self, values: Tensor) -> Tensor:
        """``[out, in] -> [out, groups]``."""
        if self._even:
            return values.view(len(values), -1, self._even).sum(-1)
        return torch.zeros_like(self.start).index_add_(1, self.index, values)

    def forward(self, x: Tensor) -> Tensor:
        y = _Scaled.apply(x, self.start * (1 + self.theta), self)
        return y if self.bias is None else y + self.bias

    def result(self) -> QuantWeight:
        """The same codes with the tuned scales, rounded to their stored dtype."""
        w = self.source
        scale = round_scale((self.start * (1 + self.theta)).detach(), w.scheme)
        return QuantWeight(w.scheme, w.codes, scale.to(w.scale.dtype), w.zero, w.order)


class _Gain(nn.Module):
    """Norm weight times (1 + phi), where the norm multiplies by offset + weight."""

    def __init__(self, weight: Tensor, offset: float) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.zeros_like(weight))
        self.offset = offset

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (1 + self.phi) + self.offset * self.phi


@dataclass(slots=True)
class TuneReport:
    """KL per token on the held-out windows, before and after (as it will be stored), and where it was best."""

    before: float
    after: float
    steps: int
    best_step: int
    accepted: bool


class Tuner:
    """Trains a whole model whose blocks hold ScaledLinear modules.

    body: ids ``[n, T]`` -> final hidden states ``[n, T, D]`` of the quantized model. head: float32 ``[vocab, D]``,
    the original's. teacher: final hidden states of the original for all windows, ``[windows, T, D]``.
    """

    def __init__(
        self, body: Callable[[Tensor], Tensor], modules: nn.Module, head: Tensor, offset: float = 0.0
    ) -> None:
        self.body, self.root, self.head = body, modules, head
        self.linears = {n: m for n, m in modules.named_modules() if isinstance(m, ScaledLinear)}
        self.norms: dict[str, Any] = {}
        for name, module in list(modules.named_modules()):
            weight = getattr(module, "weight", None)
            if "norm" in name.rpartition(".")[2] and isinstance(weight, nn.Parameter) and weight.dim() == 1:
                weight.requires_grad_(False)
                parametrize.register_parametrization(
                    module, "weight", _Gain(weight.detach(), offset), unsafe=True
                )
                self.norms[name] = module

    def parameters(self) -> list[nn.Parameter]:
        gains = [m.parametrizations["weight"][0].phi for m in self.norms.values()]
        return [m.theta for m in self.linears.values()] + gains

    def loss(self, states: Tensor, teacher: Tensor) -> tuple[float, Tensor]:
        """Mean KL per position and its gradient by ``states``; both ``[n, T, D]``.

        The gradient of KL(p || softmax(z)) by the logits z is softmax(z) - p, so no logits need to be kept.
        """
        flat, goal = states.detach().reshape(-1, states.shape[-1]), teacher.reshape(-1, states.shape[-1])
        total, grads = 0.0, []
        for at in range(0, len(flat), HEAD_ROWS):
            rows = slice(at, at + HEAD_ROWS)
            log_p = F.log_softmax(goal[rows] @ self.head.T, -1)
            log_q = F.log_softmax(flat[rows] @ self.head.T, -1)
            p = log_p.exp()
            total += float((p * (log_p - log_q)).sum(dtype=torch.float64))
            grads.append((log_q.exp_() - p) @ self.head)
        return total / len(flat), (torch.cat(grads) / len(flat)).view_as(states)

    @torch.no_grad()
    def measure(self, ids: Tensor, teacher: Tensor) -> float:
        values = [self.loss(self.body(ids[i : i + 1]), teacher[i : i + 1])[0] for i in range(len(ids))]
        return sum(values) / len(values)

    def train(
        self,
        ids: Tensor,
        teacher: Tensor,
        options: TuneOptions,
        tell: Callable[[int, float, float | None], None],
    ) -> TuneReport:
        """Train on all but the last ``held`` windows; leaves the best parameters, as they round, in place.

        tell(step, training KL, held-out KL or None).
        """
        held = min(options.held, max(1, len(ids) // 4))
        train_ids, train_goal = ids[:-held], teacher[:-held]
        held_ids, held_goal = ids[-held:], teacher[-held:]
        parameters = self.parameters()
        before = self.measure(held_ids, held_goal)
        best, best_step = before, 0
        kept = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.Adam(parameters, lr=options.lr, betas=(0.9, 0.95))
        generator = torch.Generator().manual_seed(options.seed)
        order: list[int] = []
        for step in range(1, options.steps + 1):
            if len(order) < options.batch:
                order += torch.randperm(len(train_ids), generator=generator).tolist()
            pick, order = order[: options.batch], order[options.batch :]
            warm = min(1.0, step / 4)
            for group in optimizer.param_groups:
                group["lr"] = options.lr * warm * 0.5 * (1 + math.cos(math.pi * (step - 1) / options.steps))
            with torch.enable_grad():
                states = self.body(train_ids[pick])
                kl, gradient = self.loss(states, train_goal[pick])
                optimizer.zero_grad(set_to_none=True)
                states.backward(gradient)
            optimizer.step()
            looked = None
            if step % options.every == 0 or step == options.steps:
                looked = self.measure(held_ids, held_goal)
                if looked < best:
                    best, best_step = looked, step
                    kept = [p.detach().clone() for p in parameters]
            tell(step, kl, looked)
        with torch.no_grad():
            for parameter, value in zip(parameters, kept):
                parameter.copy_(value)
        return TuneReport(before, best, options.steps, best_step, best_step > 0)

    def weights(self) -> dict[str, QuantWeight]:
        return {name: linear.result() for name, linear in self.linears.items()}

    def gains(self) -> dict[str, Tensor]:
        """Tuned norm weights, float32, by module name."""
        return {f"{name}.weight": module.weight.detach().clone() for name, module in self.norms.items()}
