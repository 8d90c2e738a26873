"""Tensor parallelism: one model on several processes, which hold a part of each layer and compute every step together.

split.py      which part each rank holds
model.py      the model of one rank, and the two places of a layer where it needs the others
ranks.py      the collectives, and the bytes they move
plan.py       a step as numbers, for the ranks that have no scheduler
driver.py     rank 0 announces each step, the others follow
processes.py  where the other ranks come from, and how they end
start.py      from options to connected ranks; worker.py is the child's way there
cost.py       what the collectives cost, from the shape alone
"""
