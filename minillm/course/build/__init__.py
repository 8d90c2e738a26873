"""Scripts that build and check the project: set-up, notebooks, structure rules. Nothing here is used by the engine."""
