"""Evaluation protocols, label check and leak audit."""
