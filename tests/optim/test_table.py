"""The parameter -> optimizer table is complete, follows its dials, and can be read."""

import pytest
import torch

from optim.config import MuonConfig, OptimConfig, OptimizerName, RouterConfig, RouterOptimizer
from optim.table import assign
from parallel.cards import CardError, CardTable, Optimizer, not_a_matrix
from tests.optim import cases


def test_matrices_go_to_muon_and_the_rest_to_adamw() -> None:
    got = assign(cases.table(cases.parameters()), OptimConfig())
    muon = {row.name.split(".")[2] for row in got.of(Optimizer.MUON)}
    adamw = {row.name.split(".")[2] for row in got.of(Optimizer.ADAMW)}
    assert muon == {"q", "kv", "o", "gate_up", "experts"}
    assert adamw == {"router", "norm"}
    assert len(got) == len(cases.KINDS)


def test_router_dials() -> None:
    cfg = OptimConfig(router=RouterConfig(optimizer=RouterOptimizer.muon, lr_scale=0.25))
    row = assign(cases.table(cases.parameters()), cfg)["layers.0.router.weight"]
    assert row.optimizer is Optimizer.MUON and row.lr_scale == 0.25
    assert assign(cases.table(cases.parameters()), cfg)["layers.0.q.weight"].lr_scale == 1.0
    with pytest.raises(ValueError, match=r"router.optimizer=muon contradicts optim.name=adamw"):
        assign(cases.table(cases.parameters()), OptimConfig(name=OptimizerName.adamw, router=cfg.router))


def test_adamw_takes_everything() -> None:
    got = assign(cases.table(cases.parameters()), OptimConfig(name=OptimizerName.adamw))
    assert len(got.of(Optimizer.ADAMW)) == len(cases.KINDS)
    assert got["layers.0.q.weight"].decay and not got["layers.0.norm.weight"].decay


def test_whole_matrix_muon_keeps_fused_parts_and_experts_apart() -> None:
    got = assign(cases.table(cases.parameters()), OptimConfig(muon=MuonConfig(per_head=False)))
    split = {row.name.split(".")[2]: row.split for row in got}
    assert not split["q"] and not split["kv"]
    assert split["gate_up"] and split["experts"]


def test_muon_without_logical_matrices_is_an_error() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    cards = {"w": cases.card("w", (4, 4), not_a_matrix(), "", Optimizer.MUON)}
    with pytest.raises(CardError, match="w is unassigned"):
        assign(CardTable(cards, {"w": weight}), OptimConfig())


def test_a_tensor_under_two_names_is_an_error() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    cards = {name: cases.card(name, (4,), not_a_matrix(), "") for name in ("embedding", "head")}
    with pytest.raises(CardError, match="assigned twice, as embedding and as head"):
        assign(CardTable(cards, {"embedding": weight, "head": weight}), OptimConfig())


def test_description_folds_layers() -> None:
    tensors = {f"layers.{i}.norm.weight": torch.nn.Parameter(torch.zeros(4)) for i in range(3)}
    cards = {name: cases.card(name, (4,), not_a_matrix(), "norm") for name in tensors}
    text = assign(CardTable(cards, dict(tensors)), OptimConfig()).describe()
    line = next(line for line in text.splitlines() if line.startswith("layers.*.norm.weight"))
    assert line.split() == ["layers.*.norm.weight", "3", "4", "adamw", "-", "×1", "no"]
    assert "adamw: 3 parameters, 12 elements" in text
    whole = assign(cases.table(cases.parameters()), OptimConfig()).describe()
    assert "per head: key 8 · value 4" in whole and "per expert: gate 12 · up 12" in whole
