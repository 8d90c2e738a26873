"""What every exercise is checked against, one module each: its `TASKS`. Oracles here know nothing of the engine."""
