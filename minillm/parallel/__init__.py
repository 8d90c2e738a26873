"""Tensor parallelism: one model on several processes, which hold a part of each layer and compute every step together.

split.py     which part each rank holds
model.py     the model of one rank, and where it needs the others
ranks.py     the collectives, and the bytes they move
"""
