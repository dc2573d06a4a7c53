"""The pieces of the generation engine (k3/engine.py): states, slots, sampling, prefix cache, one pass through the model."""
