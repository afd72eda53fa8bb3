"""Using the result of a run: a client's model, to predict, to explain and to export."""
