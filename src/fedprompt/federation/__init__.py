"""The round: sample, train, audit, aggregate, evaluate, commit. It knows no method by name."""
