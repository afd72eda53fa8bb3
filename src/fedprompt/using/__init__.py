"""Using what a run came to: a client's own model, to predict with, to look into and to hand over."""
