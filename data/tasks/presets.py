"""Generator parameters by name; docs/tasks.md has what was measured with them."""

from __future__ import annotations

from typing import Any

# For models of a few million parameters: prompts of under 40 words, answers of one or two, which the prompt does not give away.
SMALL: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 20, "max_value": 200},
    "family_relationships": {"min_family_size": 4, "max_family_size": 4},
    "count_bits": {"min_n": 1, "max_n": 4095},
    "count_primes": {"min_n": 1, "max_n": 100},
    "letter_counting": {"min_words": 3, "max_words": 6},
    "leg_counting": {"min_animals": 2, "max_animals": 3},
    "complex_arithmetic": {"operations": ["+", "-"], "operations_weights": [0.5, 0.5]},
    "base_conversion": {"min_base": 2, "max_base": 10, "min_value": 10, "max_value": 2000},
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {"small": SMALL}
