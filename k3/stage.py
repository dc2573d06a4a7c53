"""One pipeline stage of the language model, or all of it: embedding, decoder layers, output mix, head, MTP.

Legend: T tokens of whole rows or of this rank, B rows, d hidden, V vocabulary, M MTP layers, n rows of the bank that travel.
Hidden states are [T, B, d], as megatron-core's sequence-parallel operations want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from k3.activations import ActivationConfig
from k3.builder import Builder
from k3.config import ConfigError, K3Config, Residual
from k3.context import Context
from k3.draft import losses as draft_losses
from k3.head import losses_by_piece, scores
from k3.layer import Layer, MTPLayer
from k3.linear import Embedding, RMSNorm
from k3.recompute import saving
from k3.residual import ReadBlocks, ReadRunningSum, Rows, Untouched
from kernels import documents
from parallel.context import stretch
from parallel.cross_entropy import cross_entropy
from parallel.megatron import (
    MegatronModule,
    ModelType,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from parallel.rows import RowBank
from parallel.tensor import enter, own_tokens


class Stage(MegatronModule):
    """`layers` of the model; the first stage has the embedding, the last one the head and the MTP layers.

    MTP layers read the embedding too: the last stage then holds a copy, kept equal by summing both gradients.
    """

    def __init__(
        self,
        config: K3Config,
        build: Builder,
        activations: ActivationConfig,
        number: int,
        layers: range,
        rows: RowBank,
    ):
        super().__init__(config=build.megatron)
        if (chunk := activations.head_chunk) is not None and chunk < 1:
            raise ConfigError(f"activations.head_chunk={chunk}: must be at least 1; null takes all tokens at once")
        self.activations = activations
        self.model_type = ModelType.encoder_or_decoder  # read by megatron-core's schedules
        self.k3 = config
        self.world, self.grid = build.world, build.grid
        self.number, self.rows = number, rows
        self.is_first, self.is_last = number == 0, number == rows.plan.stages - 1
        self.payload: Tensor | None = None  # what the stage before sent for the micro-batch at hand
        if self.is_first or (self.is_last and config.mtp_layers):
            self.embedding = Embedding(config.vocab_size, config.hidden_size, build.megatron, self.world)
        self.layers = nn.ModuleDict({str(i): Layer(i, config, build.at("layers", i), activations) for i in layers})
        if self.is_last:
            self.output_residual = ReadBlocks(build.megatron) if config.residual is Residual.attnres else ReadRunningSum()
            self.norm = build.norm("norm", config.hidden_size)
            self.head: Any = build.column("head", config.hidden_size, config.vocab_size)
            self.mtp = nn.ModuleList(MTPLayer(config, build.at("mtp", i), activations) for i in range(config.mtp_layers))

    def set_input_tensor(self, tensors: Sequence[Tensor | None]) -> None:
        """Called by megatron-core's schedules with what the stage before has sent; None on the first stage."""
        (self.payload,) = tensors

    def forward(
        self,
        tokens: Tensor,
        document_starts: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        padding: Tensor | None = None,
        share: float = 1.0,
        score: bool = False,
        draft: bool = False,
    ) -> Tensor:
        """tokens [B, T] int64 -> logits [B, T, V], or with labels losses [1 + M, B, T / context ranks], zero where not counted;
        on all stages but the last, what goes to the next one, [(n + 1) T, B, d].

        With a loss_mask of one row the MTP layers take no part: losses [1, B, T / context ranks], and their gradients are zero.

        score: with labels, [2, B, T] on every rank instead: each label's loss and 1 where it was the likeliest token, else 0. No
        gradient, no mask, no MTP layers, any T; of the logits never more at once than `activations.head_chunk` tokens'.

        draft: with labels and a loss_mask of 1 + S rows, [2 S, B, T] instead: the MTP layer's acceptance losses as a draft,
        unrolled S steps, and where it agrees with the model (k3/draft.py). The model itself gets no gradient.

        Every rank is given the same whole rows; losses are those of a context rank's own stretch of tokens.
        document_starts bool [B, T], true at each document's first token (None: one document a row).
        labels [B, T]: the token after each position. loss_mask bool [1 + M, B, T]: which positions count, row m for the target
        m + 1 tokens ahead; None counts every position whose targets lie in its row and document. padding bool [B, T], true
        where a token is padding: it takes no part in expert balancing. share: the part of the step's tokens that is in this
        micro-batch on all data ranks together.
        Raises ValueError for tokens outside the vocabulary or tensors of the wrong shape.
        """
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            raise ValueError(f"tokens is {tokens.dtype} of shape {tuple(tokens.shape)}; give int64 [rows, at least one token]")
        b, t = tokens.shape
        self._check(tokens, labels, loss_mask, score, draft)
        scored, labels = (labels, None) if score else (None, labels)
        starts = documents.resolve(document_starts, b, t, continues=False, device=tokens.device)
        if labels is None:
            short = -t % (self._ranks * self.grid)
            tokens, starts = (F.pad(x, (0, short)) for x in (tokens, starts))  # later tokens change nothing
        context = self._context(starts, padding, share)
        if draft:
            assert labels is not None and loss_mask is not None
            with torch.no_grad():
                rows = self._backbone(tokens, context)
                state = self.output_residual(rows)
            return draft_losses(self, state, rows.bank, labels, loss_mask, context)
        rows = self._backbone(tokens, context)
        if not self.is_last:
            return self.rows.send(self.number, rows.prefix, rows.bank)
        state = self.output_residual(rows)
        if scored is not None:
            scored = F.pad(scored, (0, tokens.shape[1] - t))
            return scores(self.norm, self.head, state, scored, self.world, self.activations.head_chunk)[..., :t]
        if labels is None:
            return self._whole(self._logits(self.norm, state))[:, :t]
        if loss_mask is None:
            loss_mask = default_loss_mask(starts, 1 + self.k3.mtp_layers)
        depth = loss_mask.shape[0] - 1
        if depth < self.k3.mtp_layers and torch.is_grad_enabled():
            unused = [*self.mtp.parameters(), *(() if self.is_first else self.embedding.parameters())]
            state = Untouched.apply(state, *unused)
        losses = [self._losses(self.norm, state, labels, loss_mask[0])]
        for m, layer in enumerate(self.mtp if depth else ()):
            assert isinstance(layer, MTPLayer)
            state = layer.read(state, rows.bank)
            # position t reads the embedding of token t + m + 1 and predicts token t + m + 2
            state = layer(state, self.embedding(self._own(_ahead(labels, m))), context)
            losses.append(self._losses(layer.norm, state, _ahead(labels, m + 1), loss_mask[m + 1]))
        return torch.stack(losses)

    def _backbone(self, tokens: Tensor, context: Context) -> Rows:
        rows = self._enter(tokens)
        for layer in self.layers.values():
            rows = layer(rows, context)
        return rows

    def _enter(self, tokens: Tensor) -> Rows:
        if self.is_first:
            return Rows(self.embedding(self._own(tokens)))
        payload, self.payload = self.payload, None
        if payload is None:
            raise RuntimeError(f"stage {self.number} was given nothing by the one before: run it with parallel.run_step")
        return Rows(*self.rows.receive(self.number, payload))

    @property
    def _ranks(self) -> int:
        """Ranks that the tokens of a row are spread over: context ranks, and inside each the tensor ranks."""
        return self.world.groups.cp.size() * self.world.groups.tp.size()

    def _own(self, rows_BT: Tensor) -> Tensor:
        return stretch(rows_BT, self.world)

    def _context(self, starts: Tensor, padding: Tensor | None, share: float) -> Context:
        context_group = self.world.groups.cp
        tokens = starts.shape[1] // context_group.size()
        counted = None if padding is None else ~own_tokens(self._own(padding).t(), self.world).reshape(-1)
        return Context(starts[:, : (context_group.rank() + 1) * tokens], tokens, counted, share)

    def _whole(self, logits_TBV: Tensor) -> Tensor:
        """[B, T, V] on every rank, from each rank's stretch and slice of the vocabulary."""
        logits_TBV = gather_from_tensor_model_parallel_region(logits_TBV, group=self.world.groups.tp)
        if self.world.groups.cp.size() > 1:
            logits_TBV = gather_from_sequence_parallel_region(
                logits_TBV, tensor_parallel_output_grad=False, group=self.world.groups.cp
            )
        return logits_TBV.transpose(0, 1)

    def _logits(self, norm: RMSNorm, state: Tensor) -> Tensor:
        """[T, B, V / tensor ranks]."""
        return self.head(enter(norm(state), self.world))

    def _losses(self, norm: RMSNorm, state: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        own = self._own(labels).t(), self._own(mask).t()
        chunk = self.activations.head_chunk
        if chunk is not None:
            return losses_by_piece(norm, self.head, state, *own, self.world, chunk).t()
        return saving(self.activations.head, self._score, norm, state, *own).t()

    def _score(self, norm: RMSNorm, state: Tensor, labels_TB: Tensor, mask_TB: Tensor) -> Tensor:
        return cross_entropy(self._logits(norm, state), labels_TB, mask_TB, self.world.groups.tp)

    def _check(self, tokens: Tensor, labels: Tensor | None, loss_mask: Tensor | None, score: bool, draft: bool) -> None:
        if draft:
            self._check_draft(labels, loss_mask)
        if score and (labels is None or loss_mask is not None):
            raise ValueError("score: needs labels, and takes no loss_mask: it scores every position")
        vocabulary = self.k3.vocab_size
        for name, ids in (("tokens", tokens), ("labels", labels)):
            if ids is None:
                continue
            if ids.shape != tokens.shape:
                raise ValueError(f"{name} has shape {tuple(ids.shape)}; give {tuple(tokens.shape)}, like tokens")
            # not on CUDA: the check would wait for the device at every step
            if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
                raise ValueError(f"{name} holds {int(ids.min())}..{int(ids.max())}; the vocabulary is 0..{vocabulary - 1}")
        if score:
            return  # is padded to whole stretches
        if labels is not None and tokens.shape[1] % self._ranks:
            cp, tp = self.world.groups.cp.size(), self.world.groups.tp.size()
            raise ValueError(f"rows of {tokens.shape[1]} tokens; give a multiple of context x tensor ranks = {cp} x {tp}")
        own = tokens.numel() // (self._ranks if self.world.sequence_parallel else self.world.groups.cp.size())
        if labels is not None and own % self.grid:
            b, t = tokens.shape
            raise ValueError(f"{b} rows of {t} tokens are {own} a rank; the low precision takes multiples of {self.grid}")
        horizon = 1 + self.k3.mtp_layers if not draft or loss_mask is None else loss_mask.shape[0]
        if loss_mask is not None and (loss_mask.shape[1:] != tokens.shape or loss_mask.shape[0] not in (1, horizon)):
            raise ValueError(f"loss_mask has shape {tuple(loss_mask.shape)}; give {(horizon, *tokens.shape)}, one row a target")

    def _check_draft(self, labels: Tensor | None, loss_mask: Tensor | None) -> None:
        if labels is None or loss_mask is None or loss_mask.shape[0] < 2:
            raise ValueError("draft: needs labels, and a loss_mask of at least two rows: one more than steps")
        if not (self.is_first and self.is_last and self.k3.mtp_layers):
            raise ValueError("draft: needs the whole model on a rank, and an MTP layer")
        if self.world.groups.cp.size() > 1:
            raise ValueError("draft: context ranks hold the model's distributions of later tokens elsewhere; give parallel.cp=1")


def default_loss_mask(document_starts: Tensor, horizon: int) -> Tensor:
    """bool [horizon, B, T]: positions whose target m + 1 tokens ahead lies in their row (T + 1 tokens) and document.

    The row's last label is taken to continue the last document: the map of T tokens cannot tell otherwise.
    """
    t = document_starts.shape[1]
    known = F.pad(document_starts, (0, 1), value=False)
    return torch.stack([documents.target_mask(known, ahead=m + 1)[:, :t] for m in range(horizon)])


def _ahead(labels: Tensor, steps: int) -> Tensor:
    """labels [B, T] shifted `steps` to the left; the last ones repeat (they are never counted)."""
    if not steps:
        return labels
    steps = min(steps, labels.shape[1])
    return torch.cat([labels[:, steps:], labels[:, -1:].expand(-1, steps)], dim=1)
