"""One function per figure of the course. Each takes plain data, returns the figure and prints one line that is the
same on every machine; `show` puts the figure into the notebook."""

from minillm.course.figures.attention_map import attention_map
from minillm.course.figures.block_plan import block_plan
from minillm.course.figures.block_sizes import block_sizes
from minillm.course.figures.byte_stream import byte_stream
from minillm.course.figures.doubling import doubling
from minillm.course.figures.engine_so_far import Reading, engine_so_far
from minillm.course.figures.found_tokens import found_tokens
from minillm.course.figures.gallery import gallery
from minillm.course.figures.growth import growth
from minillm.course.figures.later_tokens import later_tokens
from minillm.course.figures.logit_lens import logit_lens
from minillm.course.figures.masks import masks
from minillm.course.figures.matrices import Matrix, matrices
from minillm.course.figures.merges import Merge, merges
from minillm.course.figures.online_softmax import online_softmax
from minillm.course.figures.pages import Pages, pages
from minillm.course.figures.precision import Precision, precision
from minillm.course.figures.prefix_tree import Served, prefix_tree
from minillm.course.figures.recompute import recompute
from minillm.course.figures.roofline import Roof, Work, roofline
from minillm.course.figures.rotation import rotation
from minillm.course.figures.score_matrix import score_matrix
from minillm.course.figures.shared_blocks import shared_blocks
from minillm.course.figures.silence import silence
from minillm.course.figures.staircase import staircase
from minillm.course.figures.street import street
from minillm.course.figures.tile_size import Cost, tile_size
from minillm.course.figures.tile_walk import tile_walk
from minillm.course.figures.token_cost import token_cost
from minillm.course.figures.token_tiles import token_tiles
from minillm.course.figures.ttft_bar import ttft_bar
from minillm.course.style import show

__all__ = [
    "Cost",
    "Matrix",
    "Merge",
    "Pages",
    "Precision",
    "Reading",
    "Roof",
    "Served",
    "Work",
    "attention_map",
    "block_plan",
    "block_sizes",
    "byte_stream",
    "doubling",
    "engine_so_far",
    "found_tokens",
    "gallery",
    "growth",
    "later_tokens",
    "logit_lens",
    "masks",
    "matrices",
    "merges",
    "online_softmax",
    "pages",
    "precision",
    "prefix_tree",
    "recompute",
    "roofline",
    "rotation",
    "score_matrix",
    "shared_blocks",
    "show",
    "silence",
    "staircase",
    "street",
    "tile_size",
    "tile_walk",
    "token_cost",
    "token_tiles",
    "ttft_bar",
]
