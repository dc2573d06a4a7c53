"""What `k3 prove` compares: a trace of a layout's steps with that of a single process, from the same parameters and tokens.

with Helper() as helper:
    reference = trace(single(cfg), helper)
    report = compare(reference, trace(cfg, helper), exact(reference))
"""
