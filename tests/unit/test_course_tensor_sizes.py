"""The largest tensor that code makes: copies count in full, views and what was there before do not."""

import torch

from minillm.course.tensor_sizes import TensorSizes


def largest(work) -> int:
    with TensorSizes() as sizes:
        work()
    return sizes.largest


def test_a_copy_counts_in_full_and_a_view_as_its_base():
    rows, columns, times = torch.randint(2, 9, (3,)).tolist()
    x = torch.randn(rows, columns)
    assert largest(lambda: x.repeat_interleave(times, dim=0)) == rows * columns * times
    assert largest(lambda: x[:, None].expand(rows, times, columns)) == rows * columns
    assert largest(lambda: x[:, None].expand(rows, times, columns).clone()) == rows * columns * times
    assert largest(lambda: x.half()) == rows * columns


def test_the_largest_of_several_is_kept_and_nothing_is_nothing():
    x = torch.randn(3)
    assert largest(lambda: (x.repeat(5), x.sum(), x.repeat(2))) == 15
    assert largest(lambda: None) == 0
