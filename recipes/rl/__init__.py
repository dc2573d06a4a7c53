"""Reinforcement learning with verifiable rewards, and on-policy distillation in the same loop (report 4.2, spec 9.3).

config.py      the dials
batch.py       trajectories packed into rows, with what the loss weighs their tokens by
objective.py   the policy gradient's loss, and distillation's
rollouts.py    the stream: prompts, sampled groups, rewards, advantages; what is not finished goes on in the next step
"""
