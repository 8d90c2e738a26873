"""Every error a user can cause, in one place.

Each message names the offending value, the limit it broke and what to change. All derive from
`MinillmError`, so a command line or a server can turn any of them into one line without a traceback.
This file does not know the engine; every house on the street may import it.
"""


class MinillmError(Exception):
    """Base of all errors that minillm raises on purpose."""


class ConfigError(MinillmError, ValueError):
    """An option is unknown, out of range, or contradicts another one."""


class CheckpointError(MinillmError):
    """A model file or folder is missing, damaged, unsupported, or does not match its config."""


class PromptError(MinillmError, ValueError):
    """A prompt can never be served: empty, too long, wrong type, or with ids outside the vocabulary."""


class ShapeError(MinillmError, ValueError):
    """Tensors whose shapes, dtypes or sizes cannot belong together."""


class QueueFullError(MinillmError):
    """The engine already holds `max_queued_requests` waiting requests; try again later."""


class BlockPoolError(MinillmError, RuntimeError):
    """The block pool was used wrongly: a block freed twice, more taken than free, counts that do not add up."""


class EngineClosedError(MinillmError):
    """The engine was closed; create a new one."""


class RankError(MinillmError):
    """A process of a tensor-parallel engine failed, died or did not answer. All of them end; create a new LLM."""


class ProducerError(MinillmError):
    """The process that tokenises a prompt while it arrives could not be started, or died. Start the prompt again."""


class NumericsError(MinillmError):
    """The model produced NaN where a number was needed, so no token can be chosen."""


class GradeError(MinillmError):
    """A notebook, a task or a saved solution of the course cannot be read, found or run."""


class StepError(MinillmError):
    """A forward pass failed. The requests in it were ended and their blocks returned.

    The original exception is its `__cause__`; `request_ids` lists the requests that were lost.
    """

    def __init__(self, message: str, request_ids: tuple[str, ...] = ()):
        super().__init__(message)
        self.request_ids = request_ids
