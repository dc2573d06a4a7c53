"""What a stage's forward pass saves for its backward pass, in bytes, from shapes alone: one function for each module of k3/.

Every storage is counted once: the input of a linear map with that map, a running sum where it is read. Parameters and the batch
do not count. tests/k3/test_memory.py compares with what autograd really holds.

True for the CPU kernels of this tree. What a GPU may keep instead: fla-core's KDA saves normalised queries and keys and two
matrices [C, C] a chunk of C tokens in the model's dtype, but neither states at chunk borders nor our float32 inverse, for K3
about a quarter less a layer; torch's fused attention may pad head widths; the conversion of a router's input to float32 may be
fused away. Experts' padding to whole tiles lives inside one product and is never saved.

Routing is taken as balanced: a rank's experts receive top_k vectors a token that the rank routes. Where context ranks differ
(MLA keeps the keys of all earlier tokens) the last one counts.

Legend: e bytes of an element, m bytes of float32 (8 in a float64 model); N tokens of a context rank, n of those on one tensor
rank between its parallel layers, r those it routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3.activations import ActivationConfig, Save
from k3.config import Balance, K3Config, OutputGate, Residual
from k3.layout import row_plan
from parallel.config import ParallelConfig, sequence_parallel

CHUNK, TILE = 64, 16  # of kernels/kda, which needs torch
ATTENTION_BLOCK = 64  # of kernels/attention on a CPU
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Share:
    """What one rank works on in one micro-batch."""

    rows: int  # sequences
    length: int  # tokens of a whole sequence
    width: int  # e: bytes of an element of the model
    parallel: ParallelConfig
    documents: int = 2  # in a sequence; from 2 on, masks are kept for them

    @property
    def stretch(self) -> int:
        """Tokens of a sequence on this context rank."""
        return self.length // self.parallel.cp

    @property
    def tokens(self) -> int:
        return self.rows * self.stretch

    @property
    def gathers(self) -> bool:
        """Column-parallel layers read a gathered copy of what the layer before gave."""
        return sequence_parallel(self.parallel)

    @property
    def between(self) -> int:
        return self.tokens // (self.parallel.tp if self.gathers else 1)

    @property
    def routed(self) -> int:
        return self.tokens // self.parallel.tp

    @property
    def math(self) -> int:
        return max(4, self.width)

    @property
    def past(self) -> int:
        """Tokens whose keys the last context rank reads."""
        return self.rows * self.length


@dataclass(frozen=True)
class Part:
    """Bytes that one unit of an activation policy saves for a micro-batch: everything, or, run again in backward, its input."""

    role: str  # "embedding", "rows", "attention", "feed_forward", "mtp", "output" or "head"
    keep: int
    recompute: int
    layer: str = ""  # the decoder or MTP layer it belongs to; its first part's input is the layer's


def saved(parts: Sequence[Part], policy: ActivationConfig | None = None) -> int:
    """Bytes of the parts under a policy, by default keeping everything."""
    policy = (policy or ActivationConfig()).effective()
    again = {role for role in ("attention", "feed_forward", "head") if getattr(policy, role) is Save.recompute}
    total, entered = 0, set()
    for part in parts:
        if part.layer and policy.layer is Save.recompute:
            total += part.recompute if part.layer not in entered else 0
            entered.add(part.layer)
        else:
            total += part.recompute if part.role in again else part.keep
    return total


def stage(c: K3Config, s: Share, layers: Sequence[range], number: int) -> list[Part]:
    """The parts of stage `number`, which has `layers[number]`; rows that came in are one of their own."""
    plan = row_plan(c, s.parallel, layers)
    parts = []
    if not number and (places := embedding(s)):
        parts.append(Part("embedding", places, places))
    if number and (arrived := plan.sent(number - 1)):
        size = arrived * s.between * c.hidden_size * s.width  # the running sum beside them is counted where it is read
        parts.append(Part("rows", size, size))
    for index in layers[number]:
        parts += layer(c, s, index)
    if number == len(layers) - 1:
        if (sources := _sources(c, c.layers)) > 1:  # a mix whose result is kept: the head and MTP layers read it
            size = s.between * (c.hidden_size * s.width + 3 * sources * s.math)
            parts.append(Part("output", size, size))
        parts.append(head(c, s))
        for ahead in range(c.mtp_layers):
            parts += _mtp(c, s, ahead)
    return parts


def embedding(s: Share) -> int:
    """Bytes that a look-up keeps: of tokens, which the batch holds, those that a tensor rank looks up in its part."""
    return s.tokens * (INDEX + 1) if s.parallel.tp > 1 else 0


def layer(c: K3Config, s: Share, index: int) -> list[Part]:
    """The attention half and the feed-forward half of decoder layer `index`, each with its read and norm."""
    inside = latent_moe(c, s) if c.is_moe(index) else gated_mlp(c, s, c.dense_size)
    attention, masks = (mla(c, s), mla_masks(s)) if c.is_mla(index) else (kda(c, s), kda_masks(c, s))
    hidden, name = s.between * c.hidden_size * s.width, f"layers.{index}"  # the running sum; the bank's rows are there anyway
    return [
        Part("attention", read(c, s, _sources(c, index)) + attention + masks, hidden + masks, name),
        Part("feed_forward", read(c, s, _sources(c, index + 1)) + inside, hidden, name),
    ]


def _sources(c: K3Config, layers: int) -> int:
    """What a sub-layer reads once so many layers have begun: finished blocks and the running sum."""
    return 1 if c.residual is Residual.sum else -(-layers // c.residual_block) + 1


def read(c: K3Config, s: Share, sources: int) -> int:
    """The residual read and the norm behind it: the running sum, a number a token, and three a token and row of a mix."""
    numbers = 1 + (3 * sources if sources > 1 else 0)
    return s.between * (c.hidden_size * s.width + numbers * s.math)


def kda(c: K3Config, s: Share) -> int:
    """Projections and their convolved forms, decay inputs, states at chunk borders, inverses, output, gate, gated output."""
    k, rows, tokens, e, m = c.kda, s.rows, s.tokens, s.width, s.math
    heads = k.heads // s.parallel.tp
    channels = tokens * heads * k.head_dim
    chunk = chunk_size(s)
    chunks = -(-s.stretch // chunk)
    padded = rows * chunks * chunk * heads * k.head_dim
    size = tokens * c.hidden_size * e
    size += 6 * channels * e  # queries, keys and values before and after their convolutions
    size += (tokens * (k.head_dim + heads) + channels) * e  # decay: low-rank and full; beta
    size += rows * heads * ((chunks + 1) * k.head_dim**2 + chunks * chunk**2) * m
    size += padded * e + tokens * heads * m + channels * e  # output, its norm's numbers, what o_proj reads
    if k.output_gate is OutputGate.full:
        size += channels * e
    elif k.output_gate is OutputGate.low_rank:
        size += (tokens * k.head_dim + channels) * e
    edges = k.conv_size - 1
    across = edges if s.parallel.cp > 1 else 0
    if across:  # how outputs depend on the incoming state; the inputs of the previous stretch
        size += padded * m + 3 * rows * across * heads * k.head_dim * e
    return size


def kda_masks(c: K3Config, s: Share) -> int:
    """Which tokens of a chunk share a document, and the tokens whose windows the convolutions look up.

    Kept by the operators themselves, and so also where they are run again.
    """
    k, chunk = c.kda, chunk_size(s)
    chunks, edges = -(-s.stretch // chunk), k.conv_size - 1
    size = s.rows * chunks * (chunk**2 + 2 * chunk + 1) * s.math if s.documents > 1 else 0
    again = s.rows * ((edges if s.parallel.cp > 1 else 0) + (s.documents - 1) * edges)
    return size + 3 * again * (2 * INDEX + k.conv_size * (INDEX + 1))


def chunk_size(s: Share) -> int:
    chunk = TILE
    while chunk < min(s.stretch, CHUNK):
        chunk *= 2
    return chunk


def mla(c: K3Config, s: Share) -> int:
    """Queries, compressed and full keys and values, output, gate; scores are computed again."""
    a, tokens, own, e, m = c.mla, s.tokens, s.between, s.width, s.math
    heads = a.heads // s.parallel.tp
    key, values = a.nope_dim + a.rope_dim, tokens * heads * a.v_dim
    compressed = a.kv_lora_rank + a.rope_dim
    size = own * c.hidden_size * e
    if s.gathers and (a.q_lora_rank is None or a.output_gate):
        size += tokens * c.hidden_size * e
    if a.q_lora_rank is not None:
        size += (own + tokens) * a.q_lora_rank * e + own * m
    size += tokens * heads * key * e
    size += own * (compressed * e + m) + s.past * compressed * e
    size += s.past * heads * (a.nope_dim + a.v_dim + key) * e  # keys twice: as they come, and beside the shared one
    size += values * e + tokens * heads * m
    if a.output_gate:
        size += values * (m + e) + (values * m if m > e else 0)  # the gate, the gated output, the output in float32
    return size


def mla_masks(s: Share) -> int:
    """The document of every key and a causal block: kept by the operator itself, as KDA's."""
    return s.past * INDEX + ATTENTION_BLOCK**2


def gated_mlp(c: K3Config, s: Share, inner: int) -> int:
    """The input, both branches and their product."""
    return s.tokens * (c.hidden_size + 3 * inner // s.parallel.tp) * s.width


def latent_moe(c: K3Config, s: Share) -> int:
    """Router scores and places, latents sorted by expert, both branches and their product, the routed sum, shared experts."""
    k, tokens, e, m = c.moe, s.routed, s.width, s.math
    own, width = s.between * c.hidden_size * e, c.expert_width
    shared = k.shared_experts * k.expert_size
    size = own if c.latent or m == e or (shared and not s.gathers) else 0
    if m > e:  # the router's input and weight in float32
        size += (tokens + k.experts) * c.hidden_size * m
    size += tokens * k.experts * (m + INDEX)  # scores; places in the order of experts, of which k a token are used
    size += tokens * ((k.top_k + 1) * (INDEX + m) + k.top_k * INDEX)
    if k.renormalise:
        size += tokens * (k.top_k + 1) * m
    if k.balance is Balance.aux:
        size += (tokens + 2 * k.experts) * m
    size += tokens * k.top_k * ((width + 3 * k.expert_size) * e + m)
    size += k.experts // s.parallel.ep * INDEX
    if c.latent_norm:
        size += tokens * (width * e + m)
    if c.latent:
        size += tokens * width * e
    if shared:
        size += s.tokens * (3 * shared // s.parallel.tp + (c.hidden_size if s.gathers else 0)) * e
    return size


def head(c: K3Config, s: Share) -> Part:
    """A state and its norm, the head's input and the probabilities of its loss, which are float32 also where logits are bf16."""
    logits = c.vocab_size // s.parallel.tp
    size = read(c, s, 1) + s.tokens * (c.hidden_size * s.width + logits * s.math + INDEX + 1)
    return Part("head", size, s.between * c.hidden_size * s.width)


def _mtp(c: K3Config, s: Share, ahead: int) -> list[Part]:
    """An MTP layer reads a state that others keep and an embedding, and ends in a norm and the head."""
    hidden, number, name = s.between * c.hidden_size * s.width, s.between * s.math, f"mtp.{ahead}"
    shifted = embedding(s) or (s.rows * s.length * INDEX if ahead else 0)
    inside = latent_moe(c, s) if c.moe.experts else gated_mlp(c, s, c.dense_size)
    labels = s.rows * s.length * INDEX  # shifted: a head that is run again keeps them
    scored = head(c, s)
    return [
        Part("mtp", 3 * hidden + 2 * number + shifted, hidden + shifted + mla_masks(s), name),
        Part("attention", read(c, s, 1) + mla(c, s) + mla_masks(s), hidden + mla_masks(s), name),
        Part("feed_forward", read(c, s, 1) + inside, hidden, name),
        Part("head", scored.keep, scored.recompute + labels),
    ]


def passing(c: K3Config, s: Share, policy: ActivationConfig | None = None) -> int:
    """Bytes that a loss needs beside what it saves, for a moment: logits, or afterwards their gradient in float32 and cast.

    A head in pieces has one piece's logits, probabilities and gradients, the whole gradient of its weight in float32 beside one
    piece's share of it, and what it reads and its gradient.
    """
    if policy is not None and policy.head_chunk is not None:
        vocabulary, cast = c.vocab_size // s.parallel.tp, s.width if s.math > s.width else 0
        positions = min(s.stretch, max(1, policy.head_chunk // s.rows))
        piece = positions * s.rows * vocabulary * (s.width + 2 * s.math + cast)
        states = 2 * s.tokens * c.hidden_size * s.width + read(c, s, 1)
        return piece + vocabulary * c.hidden_size * (s.math + cast) + states
    logits = s.tokens * (c.vocab_size // s.parallel.tp)
    forward = (1 + min(1, c.mtp_layers)) * s.width  # the main logits live on while MTP layers run
    return logits * max(forward, s.math + (s.width if s.math > s.width else 0))


def payloads(c: K3Config, s: Share, layers: Sequence[range], number: int) -> int:
    """Bytes of what comes in and goes out around one pass of a stage: each with its gradient. An upper bound."""
    plan = row_plan(c, s.parallel, layers)
    count = (plan.sent(number - 1) + 1 if number else 0) + (plan.sent(number) + 1 if number + 1 < len(layers) else 0)
    return 2 * count * s.between * c.hidden_size * s.width


def rerun(parts: Sequence[Part], policy: ActivationConfig | None = None) -> int:
    """Bytes that the largest recomputed unit saves for a moment while its backward pass runs, beside what is kept for it."""
    policy = (policy or ActivationConfig()).effective()
    again = {role for role in ("attention", "feed_forward", "head") if getattr(policy, role) is Save.recompute}
    units: dict[str, int] = {}
    for number, part in enumerate(parts):
        if part.role == "head" and policy.head_chunk is not None:
            continue  # `passing` counts its pieces
        whole = part.layer and part.role != "head" and policy.layer is Save.recompute
        if whole or part.role in again:
            unit = part.layer if whole else str(number)
            units[unit] = units.get(unit, 0) + max(0, part.keep - part.recompute)
    return max(units.values(), default=0)


def balancing(c: K3Config, s: Share, layers: range, *, last: bool) -> int:
    """Bytes of the counts that even out the experts' loads, there once: of a stage's routers."""
    k = c.moe
    counts = k.experts * (s.math + 2 * INDEX + (4 * k.bins if k.balance is Balance.quantile else 0))
    if k.balance is Balance.quantile and k.ema:
        counts += k.experts * s.math + INDEX
    return _routers(c, layers, last=last) * counts


def standing(c: K3Config, s: Share, layers: range, *, last: bool) -> int:
    """Bytes of a stage's other buffers, there once: what each dispatcher holds of its last micro-batch, largest logits."""
    attention = sum(c.is_mla(i) for i in layers) + (c.mtp_layers if last else 0)
    held = s.routed * c.moe.experts * (s.math + 1)  # weights and membership of every expert
    return _routers(c, layers, last=last) * held + attention * c.mla.heads // s.parallel.tp * s.math


def _routers(c: K3Config, layers: range, *, last: bool) -> int:
    return sum(c.is_moe(i) for i in layers) + (c.mtp_layers if last and c.moe.experts else 0)
