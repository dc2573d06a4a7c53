"""Generates text from the training modules and weights in place: prefill, decode, prefix cache, pauses.

    engine = k3.Engine(model, slots=64)
    rows = [k3.Trajectory(prompt, key=(p, k)) for p, prompt in enumerate(prompts) for k in range(8)]
    engine.run(rows, k3.Sampling(max_new_tokens=256, stop=(end,)), enough=6 * len(prompts), seed=step)

Exact in float32 on one CPU thread, bit for bit (tests/k3/test_engine.py): a prompt found in the cache continues as a cold one,
for every hit; a trajectory's tokens and log-probabilities depend on its prompt, its key and the seed, never on other rows, its
slot, the order, pauses or a draft. Prompts are cut at absolute block boundaries, decode runs in multiples of 16 rows, and each
draw has a random number of its own. The log-probabilities are those of a training pass to rounding (`mismatch` says how far
off).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np
import torch
from torch import Tensor

from k3.generation.drafts import Drafts, VerifyPast
from k3.generation.forward import advance, logits
from k3.generation.lockstep import Lockstep, fingerprint
from k3.generation.past import Derived, SlotsPast
from k3.generation.prefixes import Node, Prefixes
from k3.generation.sampling import Sampling, draw, log_probabilities, stream, uniforms
from k3.generation.states import Shapes, Slots, State
from k3.generation.trajectory import Trajectory
from k3.linear import Column
from k3.model import Model
from parallel.config import ParallelError

FEW_ROWS = 16  # products of fewer rows round differently (kernels/experts)
PREFILL_TOKENS = 512  # of one pass, all prompts together


@dataclass
class Stats:
    """Since the engine was made. prefilled and reused count tokens; a reused one was found in the cache or shared in a run."""

    prefilled: int = 0
    reused: int = 0
    decoded: int = 0
    prefill_passes: int = 0
    decode_passes: int = 0
    cleared: int = 0  # times that changed weights emptied the prefix cache
    proposed: int = 0  # tokens of the draft
    accepted: int = 0  # of them, those that the model draws itself
    verified: int = 0  # rows times passes of the model over proposals

    @property
    def acceptance(self) -> float:
        """The share of proposals that were kept; those behind a wrong one are not. 0 without a draft."""
        return self.accepted / max(1, self.proposed)

    @property
    def tokens_per_pass(self) -> float:
        """Of a row, tokens that one pass of the model gives: 1 without a draft."""
        return 1 + self.accepted / max(1, self.verified)


@dataclass
class _Prompt:
    """Tokens that some trajectories have in common, and these; once computed, what they begin from."""

    tokens: list[int]
    waiting: deque[Trajectory] = field(default_factory=deque)
    ready: tuple[State, Tensor] | None = None  # after all tokens, and the logits [V] of the last
    running: bool = False


class Engine:
    """Generates with `model`, at most `slots` trajectories at once, prompts in blocks of `block` tokens.

    `draft`: tokens that the MTP layer proposes at a time and one pass of the model verifies; the tokens are the same (see
    k3/generation/drafts.py). `prefix_bytes` bounds the prefix cache. Weights may change between runs: the cache notices by
    their bits. Tensor ranks hand in the same trajectories and draw the same tokens; data and context ranks hand in their own.
    Where experts are spread over ranks, all ranks call `run` together. Raises ParallelError for pipelines, ValueError for
    sizes that cannot be kept.
    """

    def __init__(self, model: Model, *, slots: int = 64, block: int = 64, prefix_bytes: int = 256 << 20, draft: int = 0):
        world = model.world
        if not model.is_whole:
            raise ParallelError(f"parallel.pp={world.config.pp}: generation needs all layers on a rank; give parallel.pp=1")
        self.unit = lcm(FEW_ROWS, world.groups.tp.size())
        if slots < 1 or prefix_bytes < 0:
            raise ValueError(f"slots={slots}, prefix_bytes={prefix_bytes}: give at least one slot and no negative size")
        if block < 1 or block % self.unit:
            raise ValueError(f"block={block}: must be a positive multiple of {self.unit}")
        self.model, self.stage = model, model.stages[0]
        if draft < 0 or (draft and not self.stage.k3.mtp_layers):
            raise ValueError(f"draft={draft}: needs a model with an MTP layer, which proposes the tokens; give 0")
        self.draft, self._drafts = draft, Drafts(self.stage) if draft else None
        shapes = Shapes(self.stage, draft)
        if not self.takes(model):
            raise ValueError("the model was built with low_precision, which generation does not honour; build it without")
        self.slots, self.block = -(-slots // self.unit) * self.unit, block
        self.stats = Stats()
        self._lockstep = Lockstep(world)
        self._prefixes = Prefixes(block, prefix_bytes)
        self._weights: tuple[int, ...] = ()
        self._slots = Slots(shapes, self.slots)
        self._bench = Slots(shapes, max(1, PREFILL_TOKENS // block))  # where prompts are computed
        self._reset()

    @staticmethod
    def takes(model: Model) -> bool:
        """Whether it generates with a whole model: not with one that was built with low_precision."""
        return all(isinstance(layer.kv_b_proj, Column) for layer in Shapes(model.stages[0]).mla)

    def _reset(self) -> None:
        self._active: list[Trajectory] = []  # in the first rows of the slots, the token last drawn not yet passed through
        self._jobs: list[_Prompt] = []  # in the first rows of the bench
        self._slots.length = [0] * self._slots.rows
        self._bench.length = [0] * self._bench.rows

    def clear(self) -> None:
        """Empties the prefix cache. `run` does it by itself when weights have changed."""
        self._prefixes.clear()

    def run(self, trajectories: Sequence[Trajectory], sampling: Sampling, *, enough: int | None = None, seed: int = 0) -> None:
        """Goes on with `trajectories` until `enough` of them are finished (None: all); the others keep their states, and go on
        first in the next run. Raises ValueError for an empty prompt, one outside the vocabulary, or a key given twice.
        """
        self._check(trajectories)
        with self._inference():
            self._notice_weights()
            self._sampling, self._seed = sampling, seed
            self._all, self._enough = trajectories, len(trajectories) if enough is None else enough
            for t in trajectories:
                if t.finished is None and len(t.tokens) >= sampling.max_new_tokens:
                    t.finished, t.state = "length", None
            self._streams = {id(t): stream(seed, t.key) for t in trajectories}
            self._done = sum(t.finished is not None for t in trajectories)
            self._queue()
            try:
                self._loop()
            finally:
                self._reset()

    def mismatch(self, trajectories: Sequence[Trajectory], sampling: Sampling) -> float:
        """The largest |log-probability kept - that of a training forward pass| over all tokens; 0 without any.

        One pass over all of them together. Context ranks must hand in the same trajectories, ranks that share experts call it
        together. The weights must be those that generated.
        """
        drawn = [t for t in trajectories if t.tokens] or [Trajectory([0], ())]
        rows = [torch.tensor(t.prompt + t.tokens, device=self.stage.world.device) for t in drawn]
        with self._inference():
            out = self.model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
            worst = 0.0
            for t, row, scores in zip(drawn, rows, out):
                if t.tokens:
                    logp = log_probabilities(scores[len(t.prompt) - 1 : len(row) - 1], sampling)
                    theirs = logp.gather(-1, row[len(t.prompt) :, None]).squeeze(-1).double().cpu()
                    worst = max(worst, (theirs - torch.tensor(t.logprobs, dtype=torch.float64)).abs().max().item())
        return worst

    # -- the loop: admit, one pass through the model, draw ----------------------------------------------------------------

    def _queue(self) -> None:
        self._paused: deque[Trajectory] = deque()
        prompts: dict[tuple[int, ...], _Prompt] = {}
        for t in self._all:
            if t.finished is not None:
                continue
            if t.state is not None:
                self._paused.append(t)
            else:
                tokens = (*t.prompt, *t.tokens)
                prompts.setdefault(tokens, _Prompt(list(tokens))).waiting.append(t)
        self._prompts: deque[_Prompt] = deque(prompts.values())

    def _loop(self) -> None:
        while True:
            if self._done < self._enough:
                self._admit()
            if self._done >= self._enough:  # a first token may have ended one
                self._pause()
            prefill, decode = self._lockstep.any(bool(self._jobs), bool(self._active))
            if prefill:
                self._prefill()
            elif decode and self.draft:
                self._speculate()
            elif decode:
                self._decode()
            else:
                return

    def _pause(self) -> None:
        for row, t in enumerate(self._active):
            t.state = self._slots.save(row)
        self._paused.clear()
        self._prompts.clear()
        self._reset()

    def _admit(self) -> None:
        """Fills free slots: paused trajectories, then prompts that are known or computed; starts to compute the next ones."""
        free = self.slots - len(self._active)
        pending = bool(self._jobs) or any(p.ready for p in self._prompts)
        if free < max(1, self.slots // 8) and self._active and not pending:
            return  # a pass for one prompt costs little less than for several
        while self._paused and free:
            t = self._paused.popleft()
            assert t.state is not None
            self._slots.load(len(self._active), t.state)
            self._active.append(t)
            t.state, free = None, free - 1
        for prompt in list(self._prompts):
            if free <= 0:
                return
            if prompt.ready is None and not prompt.running:
                self._start(prompt)
            if prompt.ready is not None:
                self._begin(prompt, free)
                if not prompt.waiting:
                    self._prompts.remove(prompt)
                free = self.slots - len(self._active)
            else:
                free -= len(prompt.waiting)

    def _start(self, prompt: _Prompt) -> None:
        if len(self._jobs) == self._bench.rows:
            return
        state, last = self._prefixes.find(prompt.tokens)
        if state is not None and last is not None:
            prompt.ready = state, last
        else:
            self._bench.load(len(self._jobs), state or self._bench.shapes.empty())
            self._jobs.append(prompt)
            prompt.running = True
        self.stats.reused += state.length if state is not None else 0

    def _begin(self, prompt: _Prompt, free: int) -> None:
        """Up to `free` trajectories of a computed prompt draw their first token and take slots."""
        assert prompt.ready is not None
        state, last = prompt.ready
        starting = [prompt.waiting.popleft() for _ in range(min(free, len(prompt.waiting)))]
        rows = -(-len(starting) // FEW_ROWS) * FEW_ROWS
        self._draw(starting, last.expand(rows, -1))
        for t in starting:
            if t.finished is None:
                self._slots.load(len(self._active), state)
                self._active.append(t)

    def _prefill(self) -> None:
        """Some blocks of every prompt on the bench: as many as the shortest has left, and as fit the pass."""
        jobs, bench = self._jobs, self._bench
        rows = max(1, len(jobs))
        left = [-(-(len(p.tokens) - bench.length[i]) // self.block) for i, p in enumerate(jobs)]
        size = self.block * (min(bench.rows // rows, *left) if jobs else 1)
        parts = [p.tokens[bench.length[i] : bench.length[i] + size] for i, p in enumerate(jobs)] or [[]]
        valid = [len(part) for part in parts]
        tokens = torch.tensor([part + [0] * (size - len(part)) for part in parts], device=self.stage.world.device)
        past = SlotsPast(bench, self._derived, rows, size, valid, block=self.block)
        final, mixed = advance(self.stage, tokens.flatten(), past)
        features = None
        if self._drafts is not None:
            features = self._drafts.read(final, mixed)
            self._drafts.prefill(bench, self._derived, valid, tokens, features, self.block)
        past.advance(valid)
        self.stats.prefill_passes += 1
        self.stats.prefilled += sum(valid)
        ends = [i for i, p in enumerate(jobs) if bench.length[i] == len(p.tokens)]
        last: Tensor | None = None
        if ends:
            which = [i * size + valid[i] - 1 for i in ends]
            which += [0] * (-len(which) % FEW_ROWS)
            last = logits(self.stage, final, torch.tensor(which, device=tokens.device))
        for i, prompt in enumerate(jobs):
            own = last[ends.index(i)].clone() if last is not None and i in ends else None
            if self._prefixes.limit:
                self._remember(i, prompt, past, valid[i], own, None if features is None else features[i * size :])
            if own is not None:
                prompt.ready, prompt.running = (bench.save(i), own), False
                self.stats.reused += (len(prompt.waiting) - 1) * len(prompt.tokens)
        for i in reversed(ends):
            _remove(jobs, bench, i)

    def _remember(
        self, row: int, prompt: _Prompt, past: SlotsPast, valid: int, own: Tensor | None, features: Tensor | None
    ) -> None:
        """Puts the blocks of a pass, `valid` tokens of a row, into the prefix cache."""
        length, block = self._bench.length[row], self.block
        first = length - valid
        state, keys = self._bench.save(row, first), self._prefixes.keys(prompt.tokens[:length])
        for start in range(0, valid, block):
            latents, end = state.latents[:, start : start + block].clone(), first + start + block
            if start + block >= valid:
                node = Node(replace(state, latents=latents), own)
            else:
                feature = None if features is None else features[start + block - 1].clone()
                node = Node(State(end, *past.left(row, start // block), latents, feature), None)
            self._prefixes.put(keys[: -(-end // block)], node)

    def _decode(self) -> None:
        """One token more for every active trajectory."""
        active = self._active
        rows = max(self.unit, -(-len(active) // self.unit) * self.unit)
        tokens = torch.tensor([t.tokens[-1] for t in active] + [0] * (rows - len(active)), device=self.stage.world.device)
        past = SlotsPast(self._slots, self._derived, rows, 1)
        out = logits(self.stage, advance(self.stage, tokens, past)[0])
        past.advance([1] * len(active))
        self.stats.decode_passes += 1
        self.stats.decoded += len(active)
        self._draw(active, out)
        self._let_go()

    def _speculate(self) -> None:
        """The draft's proposals for every active trajectory, one pass of the model over them, and the tokens that follow."""
        active, slots, drafts, k = self._active, self._slots, self._drafts, self.draft
        assert drafts is not None
        rows = max(self.unit, -(-len(active) // self.unit) * self.unit)
        states, logp = drafts.begin(slots, self._derived, rows, [t.tokens[-slots.behind[i] :] for i, t in enumerate(active)])
        guesses: list[list[int]] = []
        for step in range(1, k + 1):
            drawn = draw(logp, self._sampling, self._numbers(active, [step - 1]))[0] if active else []
            guesses.append(drawn + [0] * (rows - len(active)))
            if step < k:
                tokens = torch.tensor(guesses[-1], device=self.stage.world.device)
                states, logp = drafts.go_on(slots, self._derived, step, tokens, states)
        last = [t.tokens[-1] for t in active] + [0] * (rows - len(active))
        tokens = torch.tensor([last, *guesses], device=self.stage.world.device).t()
        past = VerifyPast(slots, self._derived, rows, k + 1)
        final, mixed = advance(self.stage, tokens.flatten(), past)
        out, features = logits(self.stage, final), drafts.read(final, mixed).view(rows, k + 1, -1)
        counts = self._accept(active, guesses, out)
        slots.features[:rows] = features
        slots.behind[: len(active)] = counts
        past.advance(counts)
        self.stats.decode_passes += 1
        self._let_go()

    def _accept(self, active: Sequence[Trajectory], guesses: Sequence[Sequence[int]], out: Tensor) -> list[int]:
        """Gives every trajectory what it draws from the logits [rows (k + 1), V], up to where a proposal was wrong; how many."""
        if not active:
            return []
        k = len(guesses)
        tokens, logprobs = draw(out, self._sampling, self._numbers(active, range(k + 1)))
        counts = []
        for i, t in enumerate(active):
            count = 0
            while t.finished is None and (not count or tokens[i * (k + 1) + count - 1] == guesses[count - 1][i]):
                self._take(t, tokens[i * (k + 1) + count], logprobs[i * (k + 1) + count])
                count += 1
                if count > k:
                    break
            counts.append(count)
        self.stats.proposed += k * len(active)
        self.stats.accepted += sum(counts) - len(active)
        self.stats.verified += len(active)
        self.stats.decoded += sum(counts)
        return counts

    def _let_go(self) -> None:
        for row in reversed(range(len(self._active))):
            if self._active[row].finished is not None:
                _remove(self._active, self._slots, row)

    def _draw(self, trajectories: Sequence[Trajectory], out: Tensor) -> None:
        """The next token of each, from the first rows of `out` [n, V]."""
        if not trajectories:
            return
        for t, token, logp in zip(trajectories, *draw(out, self._sampling, self._numbers(trajectories, [0]))):
            self._take(t, token, logp)

    def _numbers(self, trajectories: Sequence[Trajectory], ahead: Sequence[int]) -> np.ndarray:
        """The random numbers of the next tokens of each, trajectory by trajectory."""
        streams = [self._streams[id(t)] for t in trajectories for _ in ahead]
        return uniforms(streams, [len(t.tokens) + more for t in trajectories for more in ahead])

    def _take(self, t: Trajectory, token: int, logp: float) -> None:
        t.tokens.append(token)
        t.logprobs.append(logp)
        if token in self._sampling.stop:
            t.finished = "stop"
        elif len(t.tokens) >= self._sampling.max_new_tokens:
            t.finished = "length"
        self._done += t.finished is not None

    # -- around it -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _inference(self) -> Iterator[None]:
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with self.model.fixed_weights(), torch.inference_mode():
                yield
        finally:
            for module in training:
                module.training = True

    def _notice_weights(self) -> None:
        now = fingerprint(self.model)
        if self._lockstep.anyone(now != self._weights):
            self.stats.cleared += bool(len(self._prefixes))
            self.clear()
            self._weights = now
        self._derived = Derived()

    def _check(self, trajectories: Sequence[Trajectory]) -> None:
        vocabulary = self.stage.k3.vocab_size
        for t in trajectories:
            if not t.prompt:
                raise ValueError(f"trajectory {t.key}: its prompt is empty; give at least one token")
            low, high = min(t.prompt), max(t.prompt)
            if low < 0 or high >= vocabulary:
                raise ValueError(f"trajectory {t.key}: its prompt holds {low}..{high}; the vocabulary is 0..{vocabulary - 1}")
        if len({t.key for t in trajectories}) < len(trajectories):
            raise ValueError("two trajectories have the same key and would draw the same random numbers; give each its own")


def _remove(held: list, slots: Slots, row: int) -> None:  # type: ignore[type-arg]
    """Takes out what lies in `row`; the last one moves there."""
    last = len(held) - 1
    if row != last:
        slots.move(last, row)
        held[row] = held[last]
    held.pop()
    slots.length[last] = 0
