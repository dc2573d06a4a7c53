"""What happens around the steps of a training run: one file and one job each, in the order in which they run."""

from parallel.world import World
from recipes.callbacks.balance import Balance
from recipes.callbacks.checkpoints import Checkpoints
from recipes.callbacks.dense import DenseComparison
from recipes.callbacks.evaluation import Evaluation
from recipes.callbacks.export import Export
from recipes.callbacks.metrics import Metrics
from recipes.callbacks.pictures import Pictures
from recipes.callbacks.progress import ProgressBar
from recipes.callbacks.sample import Sample
from recipes.callbacks.summary import Summary
from recipes.callbacks.wandb import Wandb, run_id
from recipes.trainer import Callback

__all__ = [
    "Balance",
    "Checkpoints",
    "DenseComparison",
    "Evaluation",
    "Export",
    "Metrics",
    "Pictures",
    "ProgressBar",
    "Sample",
    "Summary",
    "Wandb",
    "on_first",
    "run_id",
]


def on_first(world: World, callback: Callback) -> Callback:
    """The callback on rank 0, and one that does nothing on the others."""
    return callback if world.rank == 0 else Callback()
