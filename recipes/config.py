"""The root configuration of a run, as the user types it (`k3 pretrain model=nano run.steps=200`), and the groups to choose from.

Each room owns its own part (`k3.config`, `optim.config`, ...); this file adds what belongs to the run itself. Nothing here
imports torch, so that help, completion and a dry run stay fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from data.config import SHORTEST_RECALL, DataConfig
from data.tasks.config import TasksConfig
from k3.activations import OPTIONS as ACTIVATIONS
from k3.activations import ActivationConfig
from k3.config import K3Config
from k3.presets import PRESETS, nano
from k3.qat import Qat, QatConfig
from optim.config import MuonConfig, OptimConfig, OptimizerName
from parallel.config import ParallelConfig
from recipes.gpus import EstimateConfig, Gpu
from recipes.rewards.config import RewardsConfig
from recipes.rl.config import DistillConfig, RlConfig
from slurm.config import ClusterConfig

CONF = Path(__file__).parent / "conf"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"  # bf16 parameters with fp32 masters; what the cards keep in fp32 stays so
    fp64 = "fp64"  # for proofs
    fp8 = "fp8"  # bf16, the cards' low-precision products in fp8 block scaling: Hopper with Transformer Engine
    mxfp8 = "mxfp8"  # the same in MXFP8: Blackwell with Transformer Engine


class Device(Enum):
    auto = "auto"  # CUDA if there is any, else the CPU
    cpu = "cpu"
    cuda = "cuda"


class WandbMode(Enum):
    auto = "auto"  # online where a key is configured, else offline
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class PrecisionConfig:
    name: Precision = Precision.fp32  # of parameters, activations and gradients


@dataclass
class RunConfig:
    dir: str | None = None  # the run folder; null: runs/<model>-<date>-<time>
    steps: int = 100  # optimizer steps in all, those before a resume included
    seed: int = 0  # of the initial parameters, and of what is drawn later
    init: str | None = None  # a checkpoint, run folder or published folder with the weights to begin with; null: drawn
    resume: str | None = None  # a run folder to continue, or "auto": continue what is in run.dir if anything is
    eval_every: int = 50  # steps between held-out losses; 0: only at the end
    sample_tokens: int = 64  # length of the sample generated at the end; 0: none
    sample_prompt: str = "def "  # what the sample continues
    device: Device = Device.auto
    threads: int | None = None  # CPU threads; null: OMP_NUM_THREADS, by default one a physical core
    compare_dense: float = 0.0  # share of the run (0 to 1) that model=dense trains too, at equal time; see the summary


@dataclass
class CheckpointConfig:
    every: int = 50  # steps between checkpoints; 0: only at the end and on a signal
    keep_last: int = 2  # older ones are deleted,
    keep_every: int = 0  # but not those of every so many steps; 0: none is kept for that
    asynchronous: bool = True  # written while training goes on, which waits for the copy alone


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.auto
    project: str = "k3"
    name: str | None = None  # null: the name of the run folder
    group: str | None = None  # under which W&B shows runs together
    tags: list[str] = field(default_factory=list)
    stall: float = 15.0  # minutes without a step after which an alert is sent; 0: none


class ProofDType(Enum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"  # with tolerances derived from a float64 run


class ProofDocuments(Enum):
    none = "none"  # one document a row
    few = "few"  # three a row, cut at a third and at two thirds, moved by a few tokens from row to row
    many = "many"  # of 1 to 5 tokens in one half of each row, one long document in the other
    crossing = "crossing"  # one begins 1 to 3 tokens before every eighth of a row: whatever the shards, it crosses their edges


@dataclass
class ProveConfig:
    steps: int = 3  # optimizer steps
    dtype: ProofDType = ProofDType.float64  # of parameters, activations and gradients
    batch: int = 8  # rows of one micro-batch, over all data ranks
    length: int = 64  # tokens a row
    accumulation: int = 2  # micro-batches a step
    documents: ProofDocuments = ProofDocuments.crossing
    padding: bool = True  # every other row ends in padding
    seed: int = 0  # of parameters and tokens
    verbose: bool = False  # print every parameter, not the worst alone


@dataclass
class ExamConfig:
    enabled: bool | None = None  # null: where conversations are made of tasks, and nothing keeps the model from generating
    max_new_tokens: int = 32  # of an answer to a held-out task
    samples: int = 0  # answers to each, drawn at temperature 1 as in RL; 0: one, the likeliest token each time


@dataclass
class RecallConfig:
    # of the rows in which facts are told early and asked late; []: a quarter of data.seq_length, and data.seq_length
    lengths: list[int] = field(default_factory=list)
    rows: int = 16  # of each length


class Measure(Enum):
    heldout = "heldout"  # the loss on held-out text
    tasks = "tasks"  # exact answers to held-out tasks
    recall = "recall"  # answers that stand far back, by length
    context = "context"  # the held-out loss of the same targets in rows of each length, and by their place in the longest
    draft = "draft"  # how often the model accepts what its MTP layer proposes


@dataclass
class EvalConfig:
    what: list[Measure] = field(default_factory=lambda: [Measure.heldout, Measure.tasks, Measure.recall, Measure.context])
    out: str | None = None  # a JSON file for the numbers; null: they are printed alone


@dataclass
class SftConfig:
    examples: int = 16384  # conversations that are made of tasks; data.chat.path gives others


@dataclass
class DraftConfig:
    steps: int = 7  # that the MTP layer is unrolled on its own outputs


@dataclass
class SubmitConfig:
    dry_run: bool = False  # print the script, write and submit nothing
    name: str | None = None  # of the job; null: that of the run folder
    exclude: list[str] = field(default_factory=list)  # nodes that this job must not use, beside those of cluster.exclude


@dataclass
class Config:
    phase: str = "pretrain"  # the verb, which sets it
    model: K3Config = field(default_factory=nano)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    qat: QatConfig = field(default_factory=QatConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    exam: ExamConfig = field(default_factory=ExamConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    prove: ProveConfig = field(default_factory=ProveConfig)
    nodes: int = 1  # of the job
    chain: list[str] = field(default_factory=lambda: ["pretrain"])  # phases, each of which begins with the last one's weights
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    submit: SubmitConfig = field(default_factory=SubmitConfig)
    gpu: Gpu | None = None  # whose speed and memory count
    gpus: int | None = None  # how many there are; null: as many as the layout takes
    search: bool = False  # list the fastest layouts for `gpus` that fit
    estimate: EstimateConfig = field(default_factory=EstimateConfig)


TRAINING = ("model", "optim", "data", "parallel", "activations", "precision", "qat", "run", "checkpoint", "wandb")
SUBMITTING = ("nodes", "chain", "cluster", "submit")
# which sections each job reads; its words may set no others
JOBS: dict[str, tuple[str, ...]] = {
    "pretrain": ("recipe", *TRAINING),
    "extend": ("recipe", *TRAINING, "recall"),
    "sft": ("recipe", *TRAINING, "tasks", "rewards", "exam", "sft"),
    "rl": ("recipe", *TRAINING, "tasks", "rewards", "exam", "rl"),
    "distill": ("recipe", *TRAINING, "tasks", "rewards", "exam", "rl", "distill"),
    "draft": ("recipe", *TRAINING, "draft"),
    "submit": ("recipe", *TRAINING, *SUBMITTING),
    "eval": (
        "model", "data", "parallel", "activations", "precision", "qat", "tasks", "rewards", "exam", "recall", "draft", "run",
        "eval",
    ),
    "prove": ("phase", "recipe", "model", "optim", "parallel", "activations", "qat", "prove"),
    "estimate": (
        "recipe", "model", "optim", "parallel", "activations", "precision", "qat", "data", "gpu", "gpus", "search", "estimate",
    ),
}  # fmt: skip

# options that are files, which set values of any section: `recipe=nano`
FILES: dict[str, tuple[str, ...]] = {"recipe": tuple(sorted(path.stem for path in (CONF / "recipe").glob("*.yaml")))}


def recall_lengths(cfg: Config) -> list[int]:
    """Of the rows in which recall, and the worth of a longer context, are measured; ascending."""
    whole = cfg.data.seq_length
    return sorted(set(cfg.recall.lengths or [max(SHORTEST_RECALL, whole // 4), whole]))


def cluster_of(file: Path) -> ClusterConfig:
    from omegaconf import OmegaConf

    cluster = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ClusterConfig), OmegaConf.load(file)))
    assert isinstance(cluster, ClusterConfig)
    return cluster


# group -> option -> its values: what `model=nano` chooses from
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {
    "model": dict(PRESETS),
    "optim": {
        **{name.name: partial(OptimConfig, name=name) for name in OptimizerName},
        "muonclip": partial(OptimConfig, muon=MuonConfig(per_head=False)),  # as Kimi K2 was trained: whole matrices, and QK-Clip
    },
    "precision": {name.name: partial(PrecisionConfig, name=name) for name in Precision},
    "qat": {name.name: partial(QatConfig, name=name) for name in Qat},
    "parallel": {
        "single": ParallelConfig,
        "tensor": partial(ParallelConfig, tp=2),
        "expert": partial(ParallelConfig, ep=2),
        "context": partial(ParallelConfig, cp=2),
        "data": partial(ParallelConfig, dp=2),
        "pipeline": partial(ParallelConfig, pp=2),
        "mixed": partial(ParallelConfig, tp=2, cp=2, dp=2, ep=4),
    },
    "activations": dict(ACTIVATIONS),
    # Hydra reads these files itself: a site's own goes beside them
    "cluster": {file.stem: partial(cluster_of, file) for file in sorted((CONF / "cluster").glob("*.yaml"))},
}


def options(group: str) -> tuple[str, ...]:
    """The names that `group=NAME` takes."""
    return FILES.get(group) or tuple(GROUPS[group])


def is_group(key: str) -> bool:
    return key in GROUPS or key in FILES


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every leaf of a configuration, in the order of its fields."""
    for item in fields(value):
        key, inner = prefix + item.name, getattr(value, item.name)
        if is_dataclass(inner):
            yield from leaves(inner, key + ".")
        else:
            yield key, inner
