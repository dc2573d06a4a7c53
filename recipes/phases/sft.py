"""`k3 sft`: fine-tuning on conversations in the K3 template, the assistant's own tokens alone counted (spec: chat)."""

from __future__ import annotations

from data import sft
from data.sft import PreparedChat
from data.tasks import Tasks
from k3 import Engine
from k3.construct import unwrap
from parallel.together import from_first
from parallel.world import World
from recipes import callbacks as cb
from recipes.assemble import Parts
from recipes.config import Config
from recipes.dialogue import Dialogue
from recipes.exam import Exam, Exams
from recipes.rewards.judge import Judge
from recipes.run_folder import RunFolder
from recipes.tokens import tokenizer_of
from recipes.trainer import Callback, Trainer


class Phase:
    """Reads conversations, of `data.chat.path` or made of tasks, packed best-fit into rows."""

    def __init__(self, cfg: Config, world: World):
        self.cfg, self.world = cfg, world
        self.tokenizer, _ = tokenizer_of(cfg, world)
        self.dialogue: Dialogue | None = None
        if cfg.data.chat.path is None or cfg.exam.enabled:
            tasks = Tasks(cfg.tasks)
            self.dialogue = Dialogue(tasks, self.tokenizer, Judge(cfg.rewards, tasks.rewards()), cfg.data.chat.mode)
        from_first(world, self._prepared)  # rank 0 makes it where it is missing, the others find it
        self.prepared = self._prepared()
        self.key = self.prepared.key
        self.heldout = sft.chat_heldout(cfg.data, self.prepared)
        self.lines: tuple[str, ...] = ()
        if cfg.exam.enabled is False:
            self.dialogue = None  # it has made the conversations
        elif self.dialogue is not None and cfg.parallel.pp > 1:
            self.dialogue = None
            self.lines = ("exam: left out, because pipelines do not generate",)

    def _prepared(self) -> PreparedChat:
        cfg = self.cfg
        if cfg.data.chat.path is not None:
            return sft.prepare_chat(cfg.data, self.tokenizer)
        assert self.dialogue is not None
        asked, tasks, count = self.dialogue, self.dialogue.tasks, cfg.sft.examples
        train = sft.made("tasks", f"{tasks.fingerprint}-{count}", lambda: (asked.solved(tasks.train(n)) for n in range(count)))
        heldout = sft.made("tasks.heldout", tasks.fingerprint, lambda: map(asked.solved, tasks.heldout()))
        return sft.prepare_chat(cfg.data, self.tokenizer, train, heldout)

    def trainer(self, parts: Parts, position: int) -> Trainer:
        of = {"rank": self.world.data_rank, "of": self.world.data_size, "horizon": parts.objective.horizon}
        stream = sft.chat_stream(self.cfg.data, self.prepared, position=position, **of)
        self.model = unwrap(parts.model.module)
        return Trainer(parts.model, parts.optimizer, stream, parts.objective)

    def measures(self, folder: RunFolder) -> list[Callback]:
        every = self.cfg.run.eval_every
        found: list[Callback] = [cb.Evaluation(self.heldout, None, every)]
        if self.dialogue is not None:
            exam = Exam(self.dialogue, self.world, self.dialogue.tasks.heldout(), self.cfg.exam)
            found.append(Exams(exam, Engine(self.model), folder.path, every))
        return found

    def finale(self, folder: RunFolder) -> list[Callback]:
        return []
