"""Measurements: ours, the floor and peers in the same run, as JSON with all that made them."""
