"""Experiments of papers: their configs with the numbers they published, and what running them gave."""
