"""Watches a model's forward passes through hooks: what each part gave, and which experts each token went to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import k3
from k3.router import Router
from parallel.world import World
from recipes.proof.gather import hidden

PARTS = ("embedding", "attention", "feed_forward")  # last part of the names of the modules whose outputs are kept


class Watch:
    """Hooks on this rank's part of a model. The `whole_` methods are collective."""

    def __init__(self, model: k3.Model):
        self.world: World = model.world
        self.rows = 0  # of this rank's micro-batch
        self.outputs: dict[str, Tensor] = {}  # of the first forward pass, in the order of execution
        self.chosen: dict[str, list[Tensor]] = {}  # by router, one a forward pass: [N, k]
        self.gaps: dict[str, list[Tensor]] = {}  # likewise: [N]
        self.forward = False  # parts that are computed again in the backward pass are not recorded again
        for stage in model.stages:
            stage.register_forward_pre_hook(lambda *_: setattr(self, "forward", True))
            stage.register_forward_hook(lambda *_: setattr(self, "forward", False))
        for name, module in model.named_modules():
            if name.rsplit(".", 1)[-1] in PARTS:
                module.register_forward_hook(self._part(name))
            if isinstance(module, Router):
                module.register_forward_hook(self._router(name.removesuffix(".feed_forward.router")))

    def _part(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            self.rows = output.shape[1]
            if self.forward and name not in self.outputs:
                self.outputs[name] = output.detach().clone()

        return hook

    def _router(self, name: str) -> Any:
        @torch.no_grad()
        def hook(module: Router, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            if not self.forward:
                return
            bias = module.balancer.bias
            scores = torch.sigmoid(F.linear(inputs[0].to(bias.dtype), module.weight.to(bias.dtype))) + bias
            best = scores.topk(module.top_k + 1, dim=1).values if module.top_k < scores.shape[1] else None
            gap = torch.full((len(scores),), torch.inf, dtype=bias.dtype) if best is None else best[:, -2] - best[:, -1]
            self.chosen.setdefault(name, []).append(output[0].sort(1).values)
            self.gaps.setdefault(name, []).append(gap)

        return hook

    def whole_outputs(self) -> dict[str, Tensor]:
        """By part: [T, B, d] of the first micro-batch."""
        split = self.world.sequence_parallel
        return {name: hidden(out, self.world, over_tensor_ranks=split) for name, out in self.outputs.items()}

    def whole_routes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By router: (chosen experts in ascending order [forward passes, T, B, k], selection gaps [forward passes, T, B])."""
        out = {}
        for name, chosen in self.chosen.items():
            experts, gaps = torch.stack(chosen), torch.stack(self.gaps[name])
            passes, _, k = experts.shape
            # routers see a tensor rank's own tokens, T before B, with and without sequence parallelism
            experts = hidden(experts.view(passes, -1, self.rows, k).movedim(0, 2), self.world, over_tensor_ranks=True)
            gaps = hidden(gaps.view(passes, -1, self.rows).movedim(0, 2), self.world, over_tensor_ranks=True)
            out[name] = (experts.movedim(2, 0), gaps.movedim(2, 0))
        return out
