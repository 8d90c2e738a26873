"""The engine that the course builds, as far as it has got: eight stages, booted from your functions or the reference.

    so_far = boot(llm, "v3")            # reads my_minillm/; also={"slot_mapping": my_slots} adds what is not saved yet
    so_far.generate(ids, 20)            # greedy token ids, equal to minillm's in float32
    print(so_far.describe())            # which parts are yours

`stages.py` says what a stage is, `boot.py` assembles it, `textbook.py` is the model written with three functions;
`conversation.py` answers several messages over one cache, with three more, and `branches.py` several questions about
one text, over pages that they share.
"""

from minillm.course.engine_so_far.boot import SoFar, boot
from minillm.course.engine_so_far.stages import STAGES, Stage, stages_until

__all__ = ["STAGES", "SoFar", "Stage", "boot", "stages_until"]
