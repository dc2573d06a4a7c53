"""Newton-Schulz orthogonalisation of many blocks at once, Muon's inner loop (inherited from K2 and Moonlight; report 2.5)."""

from kernels.newton_schulz.batched import COEFFICIENTS, default_chunk, orthogonalise

__all__ = ["COEFFICIENTS", "default_chunk", "orthogonalise"]
