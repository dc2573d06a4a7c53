"""Runs foreign code in a process that can reach nothing: recipes/sandbox/host.py is the side that calls it."""
