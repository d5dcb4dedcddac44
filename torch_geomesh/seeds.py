"""Seeds that all ranks derive alike from a user's seed and a few counters."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def derive_seed(seed: int, *counters: int) -> int:
    """Return 64 well mixed bits that differ for each tuple of counters (SplitMix64's finaliser)."""
    state = seed & _MASK
    for counter in (*counters, len(counters)):
        state = (state + (counter + 1) * 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state
