"""Pipelined prefill: the parts of a prompt that can be worked on at the same time (A17).

A prompt's chunk needs the cache of the chunks before it, so on one device its layers cannot overlap themselves. What
can overlap stands here:

producer.py     text becomes tokens in a process of its own while earlier tokens are computed
growing.py      a request whose prompt still arrives, and its cache that grows chunk by chunk
side_stream.py  the numbers of the next step travel to a GPU while it computes this one
stages.py       the layers lie on several processes, and chunks flow through them one behind the other
early_exit.py   prompt tokens that leave the model early: not an overlap but a leak, measured for what it costs

Lesson 17.
"""
