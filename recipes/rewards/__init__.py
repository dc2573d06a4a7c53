"""How good a completion is, by rules that a program checks: recipes/rewards/judge.py is the side that training calls."""
