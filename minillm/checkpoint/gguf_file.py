"""One GGUF file: header, metadata, tokenizer and tensors, memory-mapped.

The file is read by the `gguf` package; what is ours here is the checks (a file cut anywhere names the
tensor that suffers), reading long arrays in one pass, and the way from GGUF's names to Hugging Face's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField, ReaderTensor

from minillm.checkpoint.gguf_blocks import SUPPORTED, decode, unpermute
from minillm.checkpoint.gguf_config import gguf_config
from minillm.errors import CheckpointError
from minillm.model_config import ModelConfig
from minillm.quantize import GroupQuantized
from minillm.tokenizer import Tokenizer
from minillm.weights import LazyWeights, Weight, check_shapes

# Hugging Face's name inside a layer -> GGUF's inside a block
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ROPE_FACTORS = "rope_freqs.weight"


def read_gguf(path: Path) -> tuple[ModelConfig, LazyWeights, Tokenizer]:
    """Config, weights and tokenizer of a GGUF file of architecture llama, qwen2 or qwen3.

    Raises CheckpointError for a file that is damaged, cut, unsupported or contradicts itself.
    """
    metadata, tensors = _open(path)
    shapes = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()}
    factors = tensors[ROPE_FACTORS].data if shapes.pop(ROPE_FACTORS, None) else None

    config = gguf_config(metadata, shapes, factors, path)
    expected = check_shapes(config, shapes, path, gguf_name)

    def read(name: str) -> Weight:
        tensor = tensors[gguf_name(name)]
        rows = np.atleast_2d(tensor.data).view(np.uint8)
        if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = unpermute(rows, expected[name][0] // config.head_dim)
        weight = decode(rows, tensor.tensor_type.name, expected[name])
        if name == "model.embed_tokens.weight" and isinstance(weight, GroupQuantized):
            return weight.dequantize()  # its rows are looked up, not multiplied
        return weight

    try:
        tokenizer = Tokenizer.from_gguf(metadata, vocab_size=config.vocab_size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return config, LazyWeights(expected, read), tokenizer


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor: "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    stem, kind = name.rsplit(".", 1)  # kind: weight or bias
    if stem in OUTER_NAMES:
        return f"{OUTER_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[inner]}.{kind}"


def _open(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """Metadata by key, and tensors (still in the mapped file) by GGUF's name."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise CheckpointError(f"{path} is no GGUF file: it begins with {magic!r} instead of b'GGUF'")
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        return metadata, {tensor.name: tensor for tensor in reader.tensors}
    except (IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is cut short: its {path.stat().st_size} bytes end inside the header") from error
    except (ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader(GGUFReader):
    """The package's reader, with arrays read whole and tensors checked against the end of the file.

    The package makes two NumPy views per array entry, which costs over two seconds for the 98,000 strings
    of a vocabulary and its merges; one loop over the bytes needs a tenth of a second.
    """

    def __init__(self, path: Path):
        self.path = path
        super().__init__(path, "c")  # copy on write: PyTorch warns about arrays that it must not write to
        if self.byte_order == "S":
            raise CheckpointError(f"{path} has the byte order of another machine; convert it on this one")

    def _get_field_parts(self, orig_offs: int, raw_type: int):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        start, count, item = orig_offs + 12, int(length[0]), GGUFValueType(int(raw_item[0]))
        if count > len(self.data):
            raise ValueError(f"an array of {count} entries is longer than the file")
        if item == GGUFValueType.STRING:
            strings, end = _read_strings(memoryview(self.data), start, count)
            values = np.array(strings, dtype=object)
        elif item in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[item], count)
            end = start + values.nbytes
        else:
            raise ValueError(f"an array holds {item.name}, which no model here needs")
        # one part with all values: ReaderField.contents() returns it as a list
        return end - orig_offs, [raw_item, length, values], [2], [GGUFValueType.ARRAY]

    def _build_tensors(self, start_offs: int, fields: Sequence[ReaderField]) -> None:
        for field in fields:
            _, _, _, dims, (kind,), (offset,) = field.parts
            self._check_tensor(field.name, dims.tolist(), int(kind), start_offs + int(offset))
        super()._build_tensors(start_offs, fields)

    def _check_tensor(self, name: str, dims: list[int], kind: int, start: int) -> None:
        known = [member.name for member in GGMLQuantizationType if member == kind]
        if not known or known[0] not in SUPPORTED:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as {known[0] if known else f'type {kind}'}; "
                f"supported: {', '.join(SUPPORTED)}"
            )
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not dims or dims[0] % block:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has rows of {dims[:1]} weights, not a multiple of {block}"
            )
        end = start + math.prod(dims) // block * size
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path} is cut short: tensor {name!r} ends at byte {end}, the file at byte {len(self.data)}"
            )


def _read_strings(buffer: memoryview, position: int, count: int) -> tuple[list[str], int]:
    """`count` strings, each a 64-bit length and its UTF-8 bytes, and the position after the last one."""
    length_at = struct.Struct("<Q").unpack_from
    strings = []
    for _ in range(count):
        start = position + 8
        position = start + length_at(buffer, position)[0]
        strings.append(str(buffer[start:position], "utf-8"))
    return strings, position
