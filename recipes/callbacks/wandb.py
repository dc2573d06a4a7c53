"""The same metrics to Weights & Biases: online where a key is configured, else into the run folder, to be synced later."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path
from typing import Any, Literal

from recipes.callbacks.alerts import Alerts
from recipes.callbacks.metrics import flat
from recipes.config import WandbConfig, WandbMode
from recipes.console import say
from recipes.dashboard import answers, base_url, wanted_mode
from recipes.trainer import Callback, StepResult, Trainer

START = 20.0  # seconds for a run to be registered there
FINISH = 60.0  # seconds for what is left at the end; the rest stays on the disk
FLUSH = 2.0  # seconds: what a killed process loses of the offline log (15 by default, and then the whole of a short run)


class Wandb(Callback):
    """Logs to the run whose id is in the folder's wandb.json, made at the first start, so that a resume continues it.

    Curves are over tokens. Pictures and samples go along when they are made, and alerts (recipes/callbacks/alerts.py).
    """

    def __init__(self, cfg: WandbConfig, folder: Path, config: dict[str, Any]):
        self.cfg = cfg
        self.folder = folder
        self.config = config
        self.run: Any = None
        self.failed = True
        self.alerts = Alerts(self._alert, 60 * cfg.stall)

    def start(self, trainer: Trainer) -> None:
        mode = wanted_mode(self.cfg.mode)
        if mode is WandbMode.disabled:
            return
        self.alerts.start()
        if mode is WandbMode.online:
            try:
                self._online()
                return
            except ConnectionError as error:
                say(f"W&B: {error}; logging offline in {self.folder}")
        self.run = self._init("offline")
        say(f"W&B: offline; send it with `wandb sync {Path(self.run.dir).parent}`")

    def _online(self) -> None:
        import wandb

        url = base_url()
        if not answers(url):
            raise ConnectionError(f"{url} does not answer")
        try:
            self.run = self._init("online")
        except Exception as error:  # whatever it is: a training run does not end because a dashboard is missing
            wandb.teardown()  # its service would hold this run's id as in use
            raise ConnectionError(f"{url} refuses this run ({' '.join(str(error).split())[:200]})") from error
        say(f"W&B: {self.run.url}")

    def _init(self, mode: Literal["online", "offline"]) -> Any:
        import wandb

        run = wandb.init(
            project=self.cfg.project,
            name=self.cfg.name or self.folder.name,
            group=self.cfg.group,
            tags=list(self.cfg.tags) or None,
            id=run_id(self.folder),
            resume="allow" if mode == "online" else None,  # offline it has no meaning: the fixed id and step merge the parts
            dir=str(self.folder),
            config=self.config,
            settings=wandb.Settings(
                mode=mode,
                init_timeout=START,
                finish_timeout=FINISH,
                x_transaction_log_flush_interval=FLUSH,
                console="off",  # the progress bar would be sent line by line
                silent=True,
            ),
        )
        run.define_metric("tokens")
        run.define_metric("*", step_metric="tokens")
        return run

    def step(self, trainer: Trainer, result: StepResult) -> None:
        if self.run is not None:
            # an explicit step: a resumed run overwrites nothing and repeats nothing
            self._log({key: value for key, value in flat(result.metrics) if key != "step"}, result.step)
            self._pictures(trainer, result.step)
            self.alerts.step(result)

    def _pictures(self, trainer: Trainer, step: int) -> None:
        import wandb

        if drawn := trainer.results.pop("pictures", {}):
            self._log({f"pictures/{name}": wandb.Image(str(path)) for name, path in drawn.items()}, step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        """A training run does not end because a dashboard fails; what it lacks is in the folder."""
        try:
            self.run.log(values, step=step)
        except Exception as error:  # the client's errors have no common base
            names = ", ".join(list(values)[:3])
            say(f"W&B: {names} of step {step} not logged: {' '.join(str(error).split())[:200]}")

    def _alert(self, title: str, text: str, *, error: bool = False) -> None:
        if (run := self.run) is not None:
            run.alert(title=title, text=text, level="ERROR" if error else "WARN")

    def end(self, trainer: Trainer) -> None:
        self.failed = False

    def complete(self, trainer: Trainer) -> None:
        if self.run is not None:
            import wandb

            step = trainer.progress.step
            self._pictures(trainer, step)
            if "sample" in trainer.results:
                self._log({"sample": wandb.Table(columns=["step", "text"], data=[[step, trainer.results["sample"]]])}, step)
            self.run.summary.update({key: value for key, value in flat(trainer.results.get("summary", {}))})

    def close(self, trainer: Trainer) -> None:
        self.alerts.close(sys.exception() if self.failed else None)
        if self.run is not None:
            self.run.finish(exit_code=int(self.failed))
            self.run = None


def run_id(folder: Path, known: str | None = None) -> str:
    """The id of this run folder's W&B run; `known`, or made up, and stored the first time."""
    file = folder / "wandb.json"
    if not file.is_file():
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps({"id": known or secrets.token_hex(4)}) + "\n")
        partial.replace(file)
    return json.loads(file.read_text())["id"]
