"""Experiments of papers: their configs with the published numbers, and our results."""
