"""Differential privacy of updates: mechanism, accounting, budget, noise at the server; secure sums."""
