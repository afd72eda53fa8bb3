"""One client: its local training, evaluation and state, and many clients as one batch."""
