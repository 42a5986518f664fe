"""What is trained: the model's parameters, a float32 master of each, and the optimizer that moves the masters.

A step of 1e-6 is lost in bfloat16, which has three decimal digits. So gradients are summed up, and steps are made, in
float32; the model computes with what the masters round to.
"""

# The extra `torch` is not part of what this project is developed with.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from prorld.train.errors import LearnError, NotFinite
from prorld.train.shapes import LearnSettings

__all__ = ["Weights"]

_BETAS = (0.9, 0.95)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Weights:
    """Parameters by name."""

    def __init__(self, parameters: Mapping[str, Any], settings: LearnSettings) -> None:
        self._parameters = dict(parameters)
        for parameter in self._parameters.values():
            parameter.requires_grad_(requires_grad=True)
        self._masters = {
            name: parameter.detach().to(torch.float32, copy=True) for name, parameter in self._parameters.items()
        }
        self._grad_norm_max = settings.grad_norm_max
        # No decay: the policy is to stay near where it began, which is not zero.
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=settings.learning_rate, betas=_BETAS, weight_decay=0.0
        )

    def forget_gradients(self) -> None:
        """Before a pass, and after one that failed."""
        for name, parameter in self._parameters.items():
            parameter.grad = None
            self._masters[name].grad = None

    def take_gradients(self) -> None:
        """Add what a backward pass left to what there is, in float32."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if parameter.grad is None:
                continue
            grad = parameter.grad.to(torch.float32)
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            parameter.grad = None

    def move(self) -> float:
        """One step of the optimizer along the gradients, cut off at the greatest norm. The norm before that."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self._grad_norm_max))
        if not torch.isfinite(torch.tensor(norm)):
            raise NotFinite(f"the norm of the gradient is {norm}")
        self._optimizer.step()
        self.forget_gradients()
        self._round()
        return norm

    def state(self) -> dict[str, Any]:
        """Copies of masters and of the optimizer's moments, flat; everything that a later step depends on."""
        tensors: dict[str, Any] = {}
        for name, master in self._masters.items():
            tensors[f"master/{name}"] = master.detach().clone()
            kept = self._optimizer.state.get(master, {})
            for moment in (*_MOMENTS, "step") if kept else ():
                tensors[f"{moment}/{name}"] = kept[moment].detach().clone()
        return tensors

    def restore(self, tensors: Mapping[str, Any]) -> None:
        """Back to that state; refused, with nothing changed, where it is of other weights."""
        for name, master in self._masters.items():
            kept = tensors.get(f"master/{name}")
            if kept is None or kept.shape != master.shape:
                raise LearnError(f"the state is of another model, or of another lora_rank: {name} is not as it is here")
        if sum(name.startswith("master/") for name in tensors) != len(self._masters):
            raise LearnError("the state is of another model, or of another lora_rank: it has more weights")
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(tensors[f"master/{name}"])
                self._optimizer.state.pop(master, None)
                if f"step/{name}" in tensors:
                    self._optimizer.state[master] = {
                        "step": tensors[f"step/{name}"].clone(),
                        **{m: tensors[f"{m}/{name}"].to(master.device, copy=True) for m in _MOMENTS},
                    }
        self.forget_gradients()
        self._round()

    def _round(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(self._masters[name])
