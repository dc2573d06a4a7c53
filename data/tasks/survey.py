"""What a generator's tasks are worth: can the answer be copied from the prompt, or guessed without reading it?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from data.tasks.task import Task, normalised, occurs


@dataclass(frozen=True)
class Survey:
    """Of a number of instances of one domain; rates in 0..1, lengths in words."""

    domain: str
    instances: int
    distinct: int  # prompts
    copied: float  # instances whose answer stands in the prompt as words of its own
    contained: float  # ... anywhere, inside other words or numbers, too
    guessed: float  # accuracy of always giving the most frequent answer
    guess: str
    answers: int  # distinct
    prompt_words: tuple[int, int]  # shortest, longest
    answer_words: int  # longest

    def __str__(self) -> str:
        low, high = self.prompt_words
        return (
            f"{self.domain}: {self.distinct} prompts in {self.instances} instances; answer stands in the prompt "
            f"{self.copied:.1%} (inside a word {self.contained:.1%}); always {self.guess!r} scores {self.guessed:.1%}; "
            f"{self.answers} answers of up to {self.answer_words} word(s); prompts of {low}-{high} words"
        )


def survey(tasks: Iterable[Task]) -> list[Survey]:
    """One Survey a domain, in the order of appearance."""
    domains: dict[str, list[Task]] = {}
    for task in tasks:
        domains.setdefault(task.domain, []).append(task)
    return [_one(domain, found) for domain, found in domains.items()]


def _one(domain: str, tasks: list[Task]) -> Survey:
    count = len(tasks)
    answers = Counter(normalised(task.answer) for task in tasks)
    guess, hits = answers.most_common(1)[0]
    lengths = [len(task.prompt.split()) for task in tasks]
    return Survey(
        domain=domain,
        instances=count,
        distinct=len({" ".join(task.prompt.split()) for task in tasks}),
        copied=sum(occurs(task.answer, task.prompt) for task in tasks) / count,
        contained=sum(normalised(task.answer) in normalised(task.prompt) for task in tasks) / count,
        guessed=hits / count,
        guess=guess,
        answers=len(answers),
        prompt_words=(min(lengths), max(lengths)),
        answer_words=max(len(answer.split()) for answer in answers),
    )
