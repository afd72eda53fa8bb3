"""Accuracy, calibration and AUC from counts and scores. Only scoring imports torch."""
