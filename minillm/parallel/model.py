"""One rank's Transformer: the ordinary one with fewer heads, and a sum over all ranks in two places of each layer.

    x ----> qkv ----> attention ----> o ----SUM----> + ----> gate, up ----> silu ----> down ----SUM----> +
            cut by    over this       cut by               cut by                      cut by
            outputs   rank's heads    inputs               outputs                     inputs

Why two sums, and not one or seven: a matrix cut by its inputs leaves every rank with one summand of the answer, and
RMSNorm needs the answer. So each of the two blocks of a layer, attention and feed-forward, ends in a sum, and all that
lies between two sums needs nothing from other ranks. Each sum moves T x E values, whatever the number of heads. The
LM head is cut by vocabulary, and rank 0, which samples, collects the logits of all. Lesson 18, after Megatron-LM
(Shoeybi et al. 2019, arXiv 1909.08053); unlike there, each rank holds the whole embedding, which saves a third sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from minillm.model import Transformer
from minillm.model_config import ModelConfig
from minillm.parallel.ranks import Ranks
from minillm.parallel.split import check_split, share_of_config, share_of_weights, vocabulary_rows
from minillm.weights import Weight


class ParallelTransformer(Transformer):
    """The part of a model that one rank holds; all ranks call `forward` with the same batch at the same time.

    config, weights  of the whole model
    ranks            the processes that hold the parts
    others           as Transformer has them

    `forward` and `lm_head` give logits of the whole vocabulary on rank 0, elsewhere those of the rank's own rows.
    Raises ConfigError when the model cannot be cut into equal parts.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Weight], ranks: Ranks, **others):
        check_split(config, ranks.size)
        self.ranks = ranks
        share = share_of_weights(config, weights, ranks.rank, ranks.size)
        super().__init__(share_of_config(config, ranks.size), share, **others)

        for layer in self.layers:
            layer.o_proj = SummedOverRanks(layer.o_proj, ranks)
            layer.down_proj = SummedOverRanks(layer.down_proj, ranks)

    def make_head(self, weights) -> GatheredVocabulary:
        tied = self.config.tie_word_embeddings
        rows = vocabulary_rows(self.config.vocab_size, self.ranks.rank, self.ranks.size)
        matrix = self.embedding if tied else self.forms.tensor(weights["lm_head.weight"])
        part = matrix[rows] if tied else matrix[rows].clone()
        shared = tied and not self.host_table
        return GatheredVocabulary(self.forms.make([part], head=True), self.config.vocab_size, self.ranks, shared)


class SummedOverRanks:
    """A matrix cut by its inputs: y = x_0 @ w_0.T + x_1 @ w_1.T + ..., one summand from each rank."""

    def __init__(self, linear, ranks: Ranks):
        self.linear = linear
        self.ranks = ranks

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(self.linear(x))  # [T, E]: the all-reduce

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return self.linear.num_weight_bytes


class GatheredVocabulary:
    """The LM head cut by vocabulary: each rank scores its own rows, rank 0 puts them side by side."""

    def __init__(self, linear, vocab_size: int, ranks: Ranks, shared: bool):
        self.linear = linear
        self.vocab_size = vocab_size
        self.ranks = ranks
        self.shared = shared and hasattr(linear, "weight") and not linear.weight.is_mkldnn

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [n, V] of rows [n, E] on rank 0, [n, this rank's rows] elsewhere."""
        logits = self.linear(x)
        rows = vocabulary_rows(self.vocab_size, 0, self.ranks.size)
        missing = rows.stop - rows.start - logits.shape[1]  # the last rank may hold fewer
        parts = self.ranks.gather(torch.nn.functional.pad(logits, (0, missing)) if missing else logits)
        return torch.cat(parts, dim=1)[:, : self.vocab_size] if parts else logits

    @property
    def num_weight_bytes(self) -> Counter[str]:
        return Counter() if self.shared else self.linear.num_weight_bytes
