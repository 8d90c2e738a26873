"""The same Scheduler on a virtual clock: any model on any GPU, without having either.

    trace (who arrives when)  ->  Scheduler  ->  step time (a cost model)  ->  records, summary

`traces.py` makes arrivals, `step_time.py` says how long a step takes (`calibrate.py` fits that to this machine),
`replay.py` drives the scheduler, `records.py` counts. No tensors, no clock of the machine, the same answer to the
last digit every time. Built in lesson 14.
"""

from minillm.simulator.records import SLO, RequestRecord, summarize
from minillm.simulator.replay import Simulation, simulate
from minillm.simulator.setup import kv_blocks, make_simulated_scheduler
from minillm.simulator.step_time import FittedStepTime, RooflineStepTime
from minillm.simulator.traces import Arrival, bursts, conversations, poisson, read_trace, shared_prompt, write_trace

__all__ = [
    "SLO",
    "Arrival",
    "FittedStepTime",
    "RequestRecord",
    "RooflineStepTime",
    "Simulation",
    "bursts",
    "conversations",
    "kv_blocks",
    "make_simulated_scheduler",
    "poisson",
    "read_trace",
    "shared_prompt",
    "simulate",
    "summarize",
    "write_trace",
]
