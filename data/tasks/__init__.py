"""Verifiable tasks: reasoning-gym's generators and the user's jsonl, training and held-out apart (spec/chat.md, objectives).

tasks = Tasks(cfg.tasks)
batch = [tasks.train(i) for i in range(position, position + n)]
fixed = tasks.heldout()
lines = survey(fixed)
"""

from data.tasks.config import TasksConfig, validate
from data.tasks.survey import Survey, survey
from data.tasks.task import Task, normalised, occurs
from data.tasks.tasks import Tasks

__all__ = ["Survey", "Task", "Tasks", "TasksConfig", "normalised", "occurs", "survey", "validate"]
