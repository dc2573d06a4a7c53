"""The loss of RL and of on-policy distillation, per token of the sampled trajectories (report 4.2; spec 9.3).

With rho the ratio of the trained policy's probability of a token to that of the policy that drew it, minimise the mean over all
counted tokens of the global batch of

    -clip(rho, low, high) * advantage + tau * log(rho)^2

The second term holds every token near the policy it came from, however old that is. In RL the advantage is the trajectory's
reward less its group's mean; in distillation it is clip(log p_teacher - log p_trained, -limit, limit), as a constant, less
the mean of that of the tokens that its group drew in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import Batch
from parallel.context import stretch
from parallel.schedule import from_last_stage
from recipes.objective import Objective
from recipes.rl.batch import PolicyBatch

# what each micro-batch reports, summed over the counted tokens of the step but for the last, which is a maximum
NAMES = ("loss", "policy/ratio", "policy/clipped", "policy/divergence", "policy/entropy", "policy/advantage", "policy/mismatch")


@dataclass(frozen=True)
class PolicyObjective(Objective):
    """`weights` is (1.0,): MTP layers take no part, and their parameters get no gradient."""

    low: float = 0.8
    high: float = 1.25
    tau: float = 0.01
    limit: float = 1.0  # nats, of a teacher's log-ratio

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES

    @property
    def unit(self) -> str:
        return "of a policy gradient"  # its value is no measure of anything

    def yardstick(self, losses: Sequence[float]) -> float | None:
        return None  # it lies around zero: what is many times its median says nothing

    def denominators(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Counted tokens of the global batch, [1] float64, as often as they were drawn; at least 1."""
        count = torch.zeros(1, dtype=torch.float64)
        for batch in micro_batches:
            assert isinstance(batch, PolicyBatch)
            count += batch.loss_mask.sum() if batch.times is None else (batch.times * batch.loss_mask[0]).sum()
        return self._sum(count, self.world.groups.dp).clamp(min=1)

    def share(self, losses: Tensor, denominators: Tensor, batch: Batch | None = None) -> tuple[Tensor, Tensor]:
        """losses [1, B, T / context ranks] -> the scalar to differentiate, and NAMES' values [7] (detached)."""
        assert isinstance(batch, PolicyBatch)

        def own(x: Tensor) -> Tensor:
            return stretch(x.to(losses.device), self.world)

        counted, fresh = own(batch.loss_mask[0]), own(batch.fresh)
        times = counted.to(losses.dtype) if batch.times is None else own(batch.times).to(losses.dtype)
        log_p = -losses[0]
        log_ratio = torch.where(counted, log_p - own(batch.behaviour).to(losses.dtype), 0.0)
        if batch.teacher is not None:
            advantage = (own(batch.teacher).to(losses.dtype) - log_p.detach()).clamp(-self.limit, self.limit)
            if batch.baseline is not None:
                advantage = advantage - own(batch.baseline).to(losses.dtype)
        else:
            assert batch.advantage is not None, "a batch has advantages or a teacher"
            advantage = own(batch.advantage).to(losses.dtype)
        ratio = log_ratio.exp()
        kept = ratio.clamp(self.low, self.high)
        token = torch.where(counted, self.tau * log_ratio.square() - kept * advantage, 0.0)
        loss = (token * times).sum() / denominators[0].to(losses)
        with torch.no_grad():
            means = torch.stack([
                token, ratio, (kept != ratio).to(losses.dtype), ratio - 1 - log_ratio, losses[0], advantage,
            ])  # fmt: skip
            sums = torch.where(counted, means * times, 0.0).sum((1, 2)) / denominators[0].to(losses)
            mismatch = torch.where(fresh & counted, log_ratio.abs(), 0.0).max()
        return loss, torch.cat([sums, mismatch[None]])

    def total(self, shares: Sequence[Tensor]) -> list[float]:
        """NAMES' values over the whole step, alike on every rank."""
        device, group = self.world.device, self.world.groups.dp_cp
        parts = torch.stack(list(shares)).to(torch.float64) if shares else torch.zeros(1, len(NAMES), dtype=torch.float64)
        sums, largest = parts[:, :-1].sum(0).to(device), parts[:, -1:].max(0).values.to(device)
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return from_last_stage(torch.cat([sums, largest]), self.world).tolist()
