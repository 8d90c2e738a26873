"""A Hugging Face tokenizer.json and the files beside it, read into the arguments of `Tokenizer`.

Only byte-level BPE is understood. What a file asks for is either carried out or refused with a
CheckpointError that says what was found and what is supported; nothing is skipped silently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minillm.errors import CheckpointError
from minillm.tokenizer.bpe import BYTE_TO_CHAR
from minillm.tokenizer.pretokenize import SUPPORTED, WORD_PATTERNS, AddedToken


def json_arguments(path: str | Path) -> dict[str, Any]:
    """Keyword arguments for `Tokenizer` from a folder with tokenizer.json, or from that file itself.

    Beside it, where present: tokenizer_config.json (bos and eos token, chat template),
    chat_template.jinja (wins over the config's), generation_config.json (more eos ids; config.json stands in
    when it is missing). Raises CheckpointError.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    data = _read_json(folder / "tokenizer.json" if path.is_dir() else path)
    if data is None:
        raise _no_tokenizer_json(path, folder)
    config = _read_json(folder / "tokenizer_config.json") or {}
    try:
        return {
            **_vocabulary(data),
            **_special_ids(data, config, folder),
            "chat_template": _chat_template(folder, config),
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: tokenizer files of an unknown structure ({error!r}); {SUPPORTED}") from error


def _vocabulary(data: dict) -> dict[str, Any]:
    """Tokens, merges and how text is cut."""
    model = _bpe_model(data)
    if (decoder := data.get("decoder") or {}).get("type") != "ByteLevel":
        raise CheckpointError(f"tokenizer.json: decoder {decoder.get('type')!r} is not supported; {SUPPORTED}")
    added = {entry["content"]: entry["id"] for entry in data.get("added_tokens", [])}
    return {
        "tokens": _by_id({**model["vocab"], **added}),
        "merges": [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model["merges"]],
        "pre": _pre_name(data.get("pre_tokenizer")),
        "ignore_merges": bool(model.get("ignore_merges")),
        "nfc": _is_nfc(data.get("normalizer")),
    }


def _special_ids(data: dict, config: dict, folder: Path) -> dict[str, Any]:
    """Added tokens, what begins a prompt and what ends an answer."""
    flags = ("special", "lstrip", "rstrip", "single_word", "normalized")
    added = [
        AddedToken(entry["content"], entry["id"], **{flag: bool(entry.get(flag)) for flag in flags})
        for entry in data.get("added_tokens", [])
    ]
    ids = {**data["model"]["vocab"], **{token.content: token.id for token in added}}
    bos, eos = (_named_token(config, name, ids) for name in ("bos_token", "eos_token"))
    for content in {bos, eos} - {token.content for token in added} - {None}:
        added.append(AddedToken(content, ids[content]))  # named by the config only: a special token all the same

    prefix_id = _prefix_id(data.get("post_processor"))
    return {
        "added_tokens": added,
        "bos_token_id": ids.get(bos) if prefix_id is None else prefix_id,
        "add_bos": prefix_id is not None,  # as transformers 5 has it; add_bos_token in the config counts for nothing
        "eos_token_ids": (*([] if eos is None else [ids[eos]]), *_generation_eos(folder)),
    }


def _read_json(path: Path) -> dict | None:
    """The object in a JSON file, None when there is no such file."""
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds a {type(data).__name__}, expected an object")
    return data


def _no_tokenizer_json(path: Path, folder: Path) -> CheckpointError:
    if not path.is_dir():
        return CheckpointError(f"{path} does not exist; expected a folder that holds tokenizer.json")
    names = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt")
    found = ", ".join(name for name in names if (folder / name).exists())
    return CheckpointError(f"{folder} holds no tokenizer.json (found {found or 'no other such file'}); {SUPPORTED}")


def _bpe_model(data: dict) -> dict:
    """The "model" part, once it is certain that it is plain byte-level BPE."""
    model = data.get("model") or {}
    kind = model.get("type", "BPE" if "merges" in model else None)  # early files do not name the type
    refused = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    unsupported = [f"{key}={model[key]!r}" for key in refused if model.get(key)]
    if model.get("unk_token") and not all(char in model.get("vocab", {}) for char in BYTE_TO_CHAR):
        unsupported.append(f"unk_token={model['unk_token']!r} for bytes without a token")
    if kind != "BPE" or unsupported:
        found = ", ".join([f"model type {kind!r}", *unsupported])
        sentencepiece = " (SentencePiece)" if kind == "Unigram" or model.get("byte_fallback") else ""
        raise CheckpointError(f"tokenizer.json: {found}{sentencepiece} is not supported; {SUPPORTED}")
    return model


def _steps(node: dict | None, key: str) -> list[dict]:
    """A part of the pipeline as a flat list: nothing, one step, or the steps of a Sequence under `key`."""
    if node is None:
        return []
    return node[key] if node.get("type") == "Sequence" else [node]


def _pre_name(node: dict | None) -> str:
    steps = _steps(node, "pretokenizers")
    kinds = [step.get("type") for step in steps]
    byte_level = steps[-1] if kinds and kinds[-1] == "ByteLevel" else {}
    if byte_level.get("add_prefix_space") is False:
        splits_itself = byte_level.get("use_regex", True)
        if kinds == ["ByteLevel"] and splits_itself:
            return "gpt2"
        if kinds == ["Digits", "ByteLevel"] and splits_itself and steps[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not splits_itself and _keeps_words(steps[0]):
            for name, pattern in WORD_PATTERNS.items():
                if steps[0]["pattern"] == {"Regex": pattern}:
                    return name
    raise CheckpointError(f"tokenizer.json: pre_tokenizer {json.dumps(node)} is not supported; {SUPPORTED}")


def _keeps_words(split: dict) -> bool:
    """Both spellings of "the matches are the words"; the patterns match every character, so they say the same."""
    return (split.get("behavior"), bool(split.get("invert"))) in (("Isolated", False), ("Removed", True))


def _is_nfc(node: dict | None) -> bool:
    kinds = [step.get("type") for step in _steps(node, "normalizers")]
    if kinds not in ([], ["NFC"]):
        raise CheckpointError(f"tokenizer.json: normalizer {json.dumps(node)} is not supported; supported: none or NFC")
    return kinds == ["NFC"]


def _prefix_id(node: dict | None) -> int | None:
    """The one token that a TemplateProcessing puts before every text, if any."""
    prefix = None
    for step in _steps(node, "processors"):
        if step.get("type") == "ByteLevel":
            continue  # changes offsets only
        template = step["single"] if step.get("type") == "TemplateProcessing" else []
        shape = [next(iter(part)) for part in template]
        if shape == ["SpecialToken", "Sequence"] and prefix is None:
            (prefix,) = step["special_tokens"][template[0]["SpecialToken"]["id"]]["ids"]
        elif shape != ["Sequence"]:
            found = json.dumps(step)
            raise CheckpointError(
                f"tokenizer.json: post_processor {found} is not supported; one token before the text is"
            )
    return prefix


def _named_token(config: dict, name: str, ids: dict[str, int]) -> str | None:
    """The token that tokenizer_config.json calls bos_token or eos_token; None when it names none."""
    value = config.get(name)
    content = value["content"] if isinstance(value, dict) else value
    if content is not None and content not in ids:
        raise CheckpointError(f"tokenizer_config.json: {name} {content!r} is not in the vocabulary of tokenizer.json")
    return content


def _generation_eos(folder: Path) -> tuple[int, ...]:
    """eos_token_id may be one id, a list of them, or missing."""
    config = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json") or {}
    value = config.get("eos_token_id")
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _chat_template(folder: Path, config: dict) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several under names; "default" is the one for plain chat
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _by_id(ids: dict[str, int]) -> list[str]:
    """Tokens in the order of their ids; an id that no token has becomes "" and is never produced."""
    lowest, highest = min(ids.values()), max(ids.values())
    if lowest < 0 or highest >= 4 * len(ids) + 1024:
        raise CheckpointError(f"tokenizer.json: {len(ids)} tokens, but ids from {lowest} to {highest}")
    tokens = [""] * (highest + 1)
    for token, id in ids.items():
        if tokens[id]:
            raise CheckpointError(f"tokenizer.json: {tokens[id]!r} and {token!r} have the same id {id}")
        tokens[id] = token
    return tokens
