"""One run that says how the kernels and the engine do on an NVIDIA GPU, in at most six minutes.

    make gpu-check                                      (= python -m benchmarks.gpu_check --out gpu_check.json)
    python -m benchmarks.gpu_check --dry-run --out FILE  the same code on a CPU, small, under Triton's interpreter

Needs PyTorch and Triton, and neither a network nor a model file: weights are random. Each section runs on its own;
what fails is recorded with its traceback beside the rows that were measured. A dry run measures nothing: its times
are those of an interpreter, and it says so in the file.
"""
