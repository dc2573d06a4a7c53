"""SIGKILL at a drawn moment of a run in two processes, a restart, and what differs from the run that nothing has disturbed.

plan.py      which moment, whose rank: drawn from a seed
start.py     one start of the ranks of `k3 pretrain`, and their end
seen.py      where a run stands, by what is on the disk
trial.py     a run, killed and started again until it is complete
same.py      what differs between two finished runs
corpus.py    a made-up language to train on
"""
