"""Sliders over the roofline: prompt length, batch and GPU, and where prefill and decode then stand.

Nothing is measured: points stand on the roof, so every time is a lower bound. `predicted` makes the same picture
without sliders. Lesson 04.
"""

from __future__ import annotations

import ipywidgets
from matplotlib.figure import Figure

from minillm import costs
from minillm import roofline as times
from minillm.course.figures.roofline import Roof, Work, roofline
from minillm.course.timing import show_time
from minillm.course.widgets import choice, picture_box, slider
from minillm.devices import DEVICES, Device, find_device
from minillm.model_config import ModelConfig

DTYPE = "float16"


def predicted(config: ModelConfig, name: str, device: Device, prompt: int, batch: int) -> Figure:
    """One prefill of `prompt` tokens, then `batch` requests of that context decoding, in float16 at the roof."""
    steps = {"prefill": [(prompt, prompt)], "decode": [(1, prompt)] * batch}
    seconds = {phase: times.step_seconds(config, step, device, DTYPE) for phase, step in steps.items()}
    attention = costs.operations(config, steps["decode"])[1]
    points = {
        phase: [_point(words, costs.step_flops(config, steps[phase]), costs.step_bytes(config, steps[phase]), device)]
        for phase, words in (("prefill", f"n = {prompt:,}"), ("decode", f"batch {batch}"))
    }
    points["decode attention"] = [_point("any batch", attention.flops, attention.bytes, device)]
    title = (
        f"{name} on {device.name}: first token after {show_time(seconds['prefill'])} or more, "
        f"then every {show_time(seconds['decode'])}"
    )
    return roofline([Roof(device.name, device.peak(DTYPE), device.bandwidth, measured=False)], points, title)


def _point(label: str, flops: float, moved: float, device: Device) -> Work:
    return Work(label, flops / moved, min(device.peak(DTYPE), device.bandwidth * flops / moved))


def roofline_box(config: ModelConfig, name: str, device: str = "H100", prompt: int = 2048, batch: int = 8):
    """`predicted` with two sliders and a list of GPUs."""

    def draw(prompt: int, batch: int, device: str) -> Figure:
        return predicted(config, name, find_device(device), prompt, batch)

    controls: dict[str, ipywidgets.Widget] = {
        "prompt": slider("prompt", 16, 8192, prompt),
        "batch": slider("batch", 1, 256, batch),
        "device": choice("GPU", list(DEVICES), device),
    }
    return picture_box(draw, **controls)
