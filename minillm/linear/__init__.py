"""One weight matrix in the form that multiplies fastest on this machine; every form answers `y = form(x)`.

    PlainLinear      dense.py  the matrix as it is; any device and dtype
    PackedLinear     dense.py  the matrix re-laid once in oneDNN's tiles, instead of at every call (CPU)
    Int4Linear       int4.py   4-bit codes in the layout of PyTorch's own product (CPU)
    FewRowsInt4      int4.py   those for a few rows, where reading the weight is the whole cost, dense for more
    CodedLinear      coded.py  int8 or int4 codes, one copy: read as they are for a few rows, widened for more
    Fp8Linear        fp8.py    weights and activations rounded to 8-bit floats (GPU); EmulatedFp8 says what that costs

`choose.py` picks. What the codes mean is `quantize.py`'s business. Built in lesson 16.
"""

from minillm.linear.choose import Forms, choose_forms
from minillm.linear.coded import CodedLinear
from minillm.linear.dense import PackedLinear, PlainLinear
from minillm.linear.fp8 import EmulatedFp8, Fp8Linear
from minillm.linear.int4 import INT4_MAX_ROWS, FewRowsInt4, Int4Linear

__all__ = [
    "INT4_MAX_ROWS",
    "CodedLinear",
    "EmulatedFp8",
    "FewRowsInt4",
    "Forms",
    "Fp8Linear",
    "Int4Linear",
    "PackedLinear",
    "PlainLinear",
    "choose_forms",
]
