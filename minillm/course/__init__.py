"""What the notebooks use and the engine does not: set-up, timing, pictures, probes, guesses, claims.

Nothing on the street imports from here.
"""
