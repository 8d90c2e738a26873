"""minillm: a small LLM inference engine that can be read, and the course that builds it.

    from minillm import LLM, SamplingParams
    with LLM() as llm:
        print(llm.generate("The capital of France is")[0].outputs[0].text)

The three names are imported when they are first used, so `import minillm` itself loads nothing, not even PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors; __getattr__ does it at run time
    from minillm.config import EngineConfig
    from minillm.llm import LLM
    from minillm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str):
    if name == "LLM":
        return import_module("minillm.llm").LLM
    if name == "EngineConfig":
        return import_module("minillm.config").EngineConfig
    if name == "SamplingParams":
        return import_module("minillm.sampling_params").SamplingParams
    raise AttributeError(f"module 'minillm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
