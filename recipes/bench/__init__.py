"""`k3 bench NAME`: each file measures one thing on this machine and prints a table (recipes/cli.py has the list)."""
