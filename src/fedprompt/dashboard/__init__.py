"""A live page about runs, served to this machine. Reads `run.db` only, without torch, and never blocks a writer."""
