"""Context parallel: one sequence spread over the ranks of a cp group."""
