"""What the tokenizer tests share: random texts, and the `tokenizers` library set up like one of our models.

Random characters come from Unicode 3.2 and the emoji blocks, which every Unicode table in play knows: the
library, the `regex` package and Python's own may be years apart about characters newer than that.
"""

import json
import random
import unicodedata
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import minillm
from minillm.tokenizer import Tokenizer

KNOWN_CHARS = [chr(c) for c in range(0x30000) if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs")]
ALPHABETS = [
    [chr(c) for c in range(32, 127)],
    [chr(c) for c in range(32)] + ["\x7f", "\x85", "\u200b", "\ufeff"],
    [chr(c) for c in range(0x80, 0x250)],
    [chr(c) for c in range(0x4E00, 0x9FA5)] + list("、。「」ひらがなカタカナ한국어"),
    [chr(c) for c in range(0x1F300, 0x1F650)] + ["\u200d", "\ufe0f", "\U0001f3fd"],
    list("    \t\n\r\x0b\x0c\xa0\u2003\u2028\u3000"),
    list("eauoAEOnc\u0301\u0308\u0327\u0323\u1e9b\u2126\u212b"),
    list("'’sStTrReEvVmMlLdD ſK"),
    list("0123456789٠١²½Ⅷ൧ "),
    list("(){}[];:=<>|&*/+-_#\"'`\\$@!?.,~^% \n\tifdefor"),
    KNOWN_CHARS,
]
TRICKY_TEXTS = [
    "",
    " ",
    "  a",
    "a  ",
    "a \n\n  b",
    "\r\n\r\n x",
    "I'll don't we'VE it'S 'tis O'D",
    "x1 22  333   4444\n55555",
    "abc123def 3.14 १२३",
    "👩‍👩‍👧‍👦 🏳️‍🌈 é e\u0301 ﬁ Å",
    "def f(x):\n\tif x >= 10:\n\t\treturn [x] * 3  # é\n\n\n",
    "!!!???...\n\n---\r\n***",
    "\x00\x01\x04\x7f\x85\xa0\u2028",
    "中文，没有空格的句子。日本語のテキスト！",
    "\U000f0000\U0010fffd\ufffd",
]


def random_text(rng: random.Random, special_tokens: list[str]) -> str:
    """Runs from one alphabet each, mixed with special tokens and beginnings of special tokens."""
    pieces = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.random()
        if special_tokens and kind < 0.25:
            token = rng.choice(special_tokens)
            pieces.append(token if kind < 0.15 else token[: rng.randrange(len(token))])
        else:
            pieces.append("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(1, 9))))
    return "".join(pieces)


def fuzz(n: int, special_tokens: list[str]) -> list[str]:
    rng = random.Random()
    return TRICKY_TEXTS + [random_text(rng, special_tokens) for _ in range(n)]


# As the tokenizer.json files of Llama 3 and Qwen 2 spell them
SPLIT_PATTERNS = {
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def library_pre_tokenizer(pre: str):
    if pre == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    first = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERNS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|end|>er", "<｜übung｜>"]


def library_tokenizer(pre: str, model=None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model or models.BPE())
    tokenizer.pre_tokenizer = library_pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def library_trainer(vocab_size: int, special_tokens=()) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
        show_progress=False,
    )


def corpus() -> list[str]:
    """Code and prose in several scripts: enough to learn merges that cross bytes of one character."""
    sources = [path.read_text(encoding="utf-8") for path in Path(minillm.__file__).parent.glob("*.py")]
    prose = "Größe naïve café 中文没有空格 日本語のテキスト привет мир 👩‍👩‍👧 😀😀 don't I'LL 1234 5678\n\n  \t"
    return sources + [prose] * 50


def save(library: tokenizers.Tokenizer, folder: Path, **neighbours) -> Path:
    """tokenizer.json and more files: save(t, folder, generation_config={...}) writes generation_config.json."""
    library.save(str(folder / "tokenizer.json"))
    for name, content in neighbours.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def assert_same(ours: Tokenizer, library: tokenizers.Tokenizer, texts: list[str]) -> None:
    rng = random.Random()
    for text in texts:
        expected = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == expected, f"encode({text!r})"
        anything = rng.choices(range(library.get_vocab_size()), k=rng.randrange(12))
        for ids in (expected, anything):
            for skip in (True, False):
                decoded = library.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip_special_tokens=skip) == decoded, f"decode({ids}, {skip})"
