"""Floating-point operations of a stage's forward and backward pass, from shapes alone: one function for each module of k3/.

An operation is a multiplication or an addition: a product [m, k] [k, n] has 2 m k n. Counted are products of matrices and the
mixing of Attention Residuals; norms, activations, convolutions (8 a channel) and softmaxes are not. How each is counted:
    linear maps   2 in out a token forward, twice that backward
    attention     pairs of query and earlier-or-equal key alone (the causal half), documents not subtracted; backward with the
                  scores once more, as every fused kernel does
    KDA           the products of kernels/kda in chunks of 64 tokens: triangular ones as whole squares, the inverse by blocks; its
                  backward computes tiles, W, U and pseudo-values once more
    experts       top_k a token, evenly over the expert ranks
"Useful" operations, which MFU counts, are three times the forward ones: nothing that is computed twice counts twice.
tests/k3/test_flops.py compares with torch's counter on real models.

Legend: N tokens of a context rank, n of those between parallel layers, r those a tensor rank routes (`k3.memory.Share`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from k3.activations import ActivationConfig, Save
from k3.cards import describe
from k3.config import Gate, K3Config, OutputGate, Residual
from k3.layout import row_plan
from k3.memory import TILE, Share, chunk_size
from parallel.cards import Group
from parallel.config import ParallelConfig

# of the diagonal tiles [16, 16] in products of a tile with K channels: forward, backward
DIAGONAL = {Gate.bounded: (3, 6), Gate.softplus: (2, 4 + TILE)}


@dataclass(frozen=True)
class Work:
    """Operations of one kind in one part of a stage, of one micro-batch on one rank."""

    kind: str  # "projections", "kda", "attention", "dense", "experts", "shared", "latent", "router", "mixing", "head"
    forward: int
    backward: int  # what the kernels compute once more included
    role: str = ""  # of the activation policy: "attention", "feed_forward", "mtp", "output" or "head"
    layer: str = ""  # "layers.3", "mtp.0", or nothing

    @property
    def useful(self) -> int:
        return 3 * self.forward


def stage(c: K3Config, s: Share, layers: Sequence[range], number: int, *, block: int = 1) -> list[Work]:
    """The work of stage `number`, which has `layers[number]`. block: queries that read the same keys (kernels/attention: 64)."""
    work: list[Work] = []
    for index in layers[number]:
        work += layer(c, s, index, block)
    if number == len(layers) - 1:
        work += [*mixing(c, s, c.layers, "output"), head(c, s)]
        for ahead in range(c.mtp_layers):
            work += _mtp(c, s, f"mtp.{ahead}", block)
    return work


def layer(c: K3Config, s: Share, index: int, block: int = 1) -> list[Work]:
    """Both halves of decoder layer `index`, each with its residual read."""
    name = f"layers.{index}"
    attention = mla(c, s, block) if c.is_mla(index) else kda(c, s)
    feed_forward = latent_moe(c, s) if c.is_moe(index) else [gated_mlp(c, s, c.dense_size, "dense")]
    return [
        *_in(mixing(c, s, index), "attention", name),
        *_in(attention, "attention", name),
        *_in(mixing(c, s, index + 1), "feed_forward", name),
        *_in(feed_forward, "feed_forward", name),
    ]


def _in(work: Iterable[Work], role: str, layer: str) -> list[Work]:
    return [Work(w.kind, w.forward, w.backward, role, layer) for w in work]


def linear(kind: str, operations: int, role: str = "") -> Work:
    return Work(kind, operations, 2 * operations, role)


def mixing(c: K3Config, s: Share, layers: int, role: str = "") -> list[Work]:
    """A score and a weighted sum over the finished blocks and the running sum; nothing where there is one source."""
    sources = 1 if c.residual is Residual.sum else -(-layers // c.residual_block) + 1
    return [linear("mixing", 4 * sources * s.between * c.hidden_size, role)] if sources > 1 else []


def kda(c: K3Config, s: Share) -> list[Work]:
    """Projections with their low-rank ones, and the recurrence in chunks."""
    k, d = c.kda, c.hidden_size
    heads = k.heads // s.parallel.tp
    channels = heads * k.head_dim
    full = 5 if k.output_gate is OutputGate.full else 4  # q, k, v, output and its gate
    outputs = full * d * channels + d * k.head_dim + k.head_dim * channels + d * heads
    if k.output_gate is OutputGate.low_rank:
        outputs += d * k.head_dim + k.head_dim * channels
    forward, backward = chunk_products(c, s)
    chunks = s.rows * -(-s.stretch // chunk_size(s)) * heads
    return [linear("projections", 2 * s.tokens * outputs), Work("kda", chunks * forward, chunks * backward)]


def chunk_products(c: K3Config, s: Share) -> tuple[int, int]:
    """Forward and backward operations of one chunk of one head."""
    size, width = chunk_size(s), c.kda.head_dim
    tile, square, state = 2 * TILE * TILE * width, 2 * size * size * width, 2 * size * width * width
    ahead, back = (size // TILE * products * tile for products in DIAGONAL[c.kda.gate])
    inverse, half = 0, TILE
    while half < size:  # two halves are joined: queries and keys of the second with keys of the first
        pairs = size // (2 * half)
        ahead += pairs * 2 * (2 * half * half * width)
        back += pairs * 4 * (2 * half * half * width)
        inverse += pairs * 2 * (2 * half**3)
        half *= 2
    forward = ahead + inverse + 3 * square + 3 * state
    backward = (ahead + 2 * square + state) + back + 6 * square + 6 * state
    if s.parallel.cp > 1:  # what the stretch does to an incoming state, and what that adds to outputs and states
        forward += 4 * state + square + 2 * width**3
        backward += state
    return forward, backward


def mla(c: K3Config, s: Share, block: int = 1) -> list[Work]:
    """Queries, latents, keys and values of all tokens up to this rank's, scores and sums, gate and output."""
    a, d = c.mla, c.hidden_size
    heads, key = a.heads // s.parallel.tp, a.nope_dim + a.rope_dim
    own = d * (a.kv_lora_rank + a.rope_dim) + (d * a.q_lora_rank if a.q_lora_rank is not None else 0)
    each = (a.q_lora_rank or d) * heads * key + heads * a.v_dim * d * (2 if a.output_gate else 1)
    past = a.kv_lora_rank * heads * (a.nope_dim + a.v_dim)
    pairs = s.rows * heads * pairs_seen(s.stretch, s.past // s.rows, block)
    return [
        linear("projections", 2 * (s.between * own + s.tokens * each + s.past * past)),
        Work("attention", 2 * pairs * (key + a.v_dim), 2 * pairs * (3 * key + 2 * a.v_dim)),
    ]


def pairs_seen(queries: int, keys: int, block: int = 1) -> int:
    """Pairs of the last `queries` of `keys` positions with the keys up to the end of their block of queries."""
    blocks, rest = divmod(queries, block)
    before = keys - queries
    whole = blocks * block * before + block * block * blocks * (blocks + 1) // 2
    return whole + rest * keys


def gated_mlp(c: K3Config, s: Share, inner: int, kind: str) -> Work:
    return linear(kind, 2 * s.tokens * 3 * c.hidden_size * inner // s.parallel.tp)


def latent_moe(c: K3Config, s: Share) -> list[Work]:
    """Router, latents down and up, top_k experts a token, shared experts."""
    k, d = c.moe, c.hidden_size
    work = [
        linear("router", 2 * s.routed * d * k.experts),
        linear("experts", 2 * s.routed * k.top_k * 3 * c.expert_width * k.expert_size),
    ]
    if c.latent:
        work.append(linear("latent", 2 * s.routed * 2 * d * k.latent_size))
    if k.shared_experts:
        work.append(gated_mlp(c, s, k.shared_experts * k.expert_size, "shared"))
    return work


def head(c: K3Config, s: Share) -> Work:
    return linear("head", 2 * s.tokens * c.hidden_size * c.vocab_size // s.parallel.tp, "head")


def _mtp(c: K3Config, s: Share, name: str, block: int) -> list[Work]:
    """The joining projection, an MLA block with its feed-forward part, and the head once more."""
    inputs = 2 + (1 + len(c.draft_blocks) if c.draft else 0)
    joined = linear("projections", 2 * s.between * inputs * c.hidden_size**2)
    inside = latent_moe(c, s) if c.moe.experts else [gated_mlp(c, s, c.dense_size, "dense")]
    return [
        *_in([joined], "mtp", name),
        *_in(mla(c, s, block), "attention", name),
        *_in(inside, "feed_forward", name),
        Work("head", head(c, s).forward, head(c, s).backward, "head", name),
    ]


def again(work: Sequence[Work], policy: ActivationConfig) -> list[Work]:
    """What the backward pass computes once more under a policy: an upper bound, as it stops at the last saved tensor."""
    policy = policy.effective()
    roles = {role for role in ("attention", "feed_forward", "head") if getattr(policy, role) is Save.recompute}
    whole = {"attention", "feed_forward", "mtp"} if policy.layer is Save.recompute else set()
    return [w for w in work if w.role in roles or w.role in whole]


def per_token(c: K3Config, length: int) -> dict[str, float]:
    """kind -> useful operations a token, forward and backward, in sequences of `length` tokens; "mtp": all of MTP layers."""
    s = Share(1, length, 2, ParallelConfig(), documents=1)
    out: dict[str, float] = {}
    for w in stage(c, s, [range(c.layers)], 0):
        kind = "mtp" if w.layer.startswith("mtp") else w.kind
        out[kind] = out.get(kind, 0.0) + w.useful / length
    return out


@dataclass(frozen=True)
class Parameters:
    """total and active without MTP layers; active: those a token meets, without the input embedding, as the report counts."""

    total: int
    active: int
    mtp: int


def parameters(c: K3Config) -> Parameters:
    total = active = mtp = 0
    for card in describe(c).values():
        size = card.numel(tp=1, ep=1)
        if card.name.startswith("mtp."):
            mtp += size
            continue
        total += size
        if card.placement.group is Group.EXPERT:
            active += size * c.moe.top_k // c.moe.experts
        elif not card.name.startswith("embedding."):
            active += size
    return Parameters(total, active, mtp)


def travelling(c: K3Config, s: Share, layers: Sequence[range], number: int) -> int:
    """Bytes of one micro-batch that stage `number` hands to the next one, and gets back as gradients."""
    if number + 1 >= len(layers):
        return 0
    return (row_plan(c, s.parallel, layers).sent(number) + 1) * s.between * c.hidden_size * s.width
