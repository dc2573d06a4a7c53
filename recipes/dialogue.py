"""Tasks as conversations: what the model is asked, what it should have said, and what its answer is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from data import chat
from data.config import ChatMode
from data.tasks import Task, Tasks
from data.tokenizer import Tokenizer
from recipes.rewards.judge import Completion, Judge, Verdict
from recipes.rl.config import Effort

EVERY = "*"  # all domains
MALFORMED = "malformed"  # the problem of an answer that is no message of the template, beside the judge's KINDS


@dataclass(frozen=True)
class Dialogue:
    """Prompts and answers in the K3 template. efforts: what prompts of a domain state, in turn; of any other, none."""

    tasks: Tasks
    tokenizer: Tokenizer
    judge_of: Judge
    mode: ChatMode
    efforts: Mapping[str, tuple[Effort, ...]] = field(default_factory=dict)

    @property
    def fill(self) -> int:
        return self.tokenizer.eos

    @property
    def stop(self) -> tuple[int, ...]:
        """The token that ends a message."""
        return (self.tokenizer.structure().end_of_message,)

    def task(self, number: int) -> Task:
        return self.tasks.train(number)

    def effort(self, number: int, task: Task) -> Effort:
        """What prompt `number` states."""
        given = self.efforts.get(task.domain) or self.efforts.get(EVERY, (Effort.none,))
        return given[number // self.tasks.turns % len(given)]  # domains take turns themselves

    def prompt(self, task: Task, effort: Effort) -> list[int]:
        """Up to where the model goes on: options, the question, and the opening of its first channel."""
        rendered = chat.render(self.question(task, effort), mode=self.mode, generation=True)
        return rendered.encode(self.tokenizer)[0].tolist()

    def question(self, task: Task, effort: Effort) -> chat.Conversation:
        stated = None if effort is Effort.none else chat.Effort[effort.name]
        return chat.Conversation((chat.User(task.prompt),), effort=stated)

    def solved(self, task: Task) -> chat.Conversation:
        """The conversation that a model should have had: the question and its answer."""
        think = "" if self.mode is ChatMode.thinking else None
        return chat.Conversation((chat.User(task.prompt), chat.Assistant(think=think, response=task.answer)))

    def judge(self, answers: Sequence[tuple[Task, Sequence[int]]]) -> list[Verdict]:
        """The worth of sampled tokens, the stop token included. What is no message is worth nothing; where the model itself ended
        it, and it was not cut off, that is told as a problem, too.
        """
        read = [chat.parse_completion(tokens, self.tokenizer, mode=self.mode) for _, tokens in answers]
        verdicts = self.judge_of.score(
            [
                (task, Completion(self.tokenizer.decode(tokens), None if one.error else one.response))
                for (task, tokens), one in zip(answers, read)
            ]
        )
        ended = [bool(tokens) and tokens[-1] in self.stop for _, tokens in answers]
        return [
            replace(v, problems=(*v.problems, MALFORMED), detail=v.detail or str(one.error)) if one.error and end else v
            for v, one, end in zip(verdicts, read, ended)
        ]
