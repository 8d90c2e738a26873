"""Whatever is handed to `LLM` and is not what it takes: a typed error that names it, and nothing is left behind."""

import math

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.config import EngineConfig
from minillm.errors import ConfigError, MinillmError, PromptError
from minillm.perplexity import perplexity
from minillm.tokenizer.chat_template import ChatTemplate

NAN = math.nan
IDS = list(range(20))
MESSAGE = {"role": "user", "content": "Hi"}
FEW = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
NO_WORD = [5, True, 1.5, b"cpu", ["cpu"], {}, torch.ones(2)]
NO_PROMPT = [None, 5, 5.0, True, b"ab", {}, {"a": 1}, {1, 2}, Ellipsis, [None], [5.5], [NAN], [True], [[1, True]]]
NO_PROMPT += [[-1], [10**30], ["a", 5], [1, "a"], [["a"]], [[]], "", "\ud800", ["a", "\ud800"]]
NO_NUMBER = [0, -1, "a", "3", 1.0, NAN, True, [], {}]
CALLS = {
    "generate": lambda llm, prompt: llm.generate(prompt, FEW, use_tqdm=False),
    "stream": lambda llm, prompt: list(llm.stream(prompt, FEW)),
    "chat": lambda llm, prompt: llm.chat(prompt, FEW, use_tqdm=False),
    "score": lambda llm, prompt: llm.score(prompt),
    "logits": lambda llm, prompt: llm.logits(prompt),
    "perplexity": lambda llm, prompt: perplexity(llm, prompt, 8, 4, use_tqdm=False),
    "decode": lambda llm, prompt: llm.tokenizer.decode(prompt),
}


@pytest.fixture(scope="module")
def llm():
    with LLM("random:tiny", dtype="float32", num_kv_blocks=16) as llm:
        llm.tokenizer.chat_template = "{{ messages[0].content }}"
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(llm):
    yield
    assert not llm.engine.has_work and llm.engine.scheduler.block_pool.num_free == 16
    assert llm._producer is None, "a process was started for a text that is none"


@pytest.mark.parametrize("prompt", NO_PROMPT, ids=repr)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_no_prompt_is_refused_by_every_call(llm, call, prompt):
    with pytest.raises(PromptError):
        call(llm, prompt)


@pytest.mark.parametrize(
    "messages",
    [
        "Hi",
        [MESSAGE, [MESSAGE]],
        [[MESSAGE], 5],
        [[]],
        [{"role": "user"}],
        [{"content": "Hi"}],
        [MESSAGE | {"role": 5}],
    ]
    + [[MESSAGE | {"content": content}] for content in (None, 5, True, NAN, b"Hi")],
    ids=repr,
)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(PromptError, match="message"):
        llm.chat(messages, FEW, use_tqdm=False)


def test_a_conversation_may_be_a_tuple_streamed_or_not(llm):
    (whole,) = llm.chat((MESSAGE,), FEW, use_tqdm=False)
    streamed = [id for chunk in llm.stream((MESSAGE,), FEW) for id in chunk.token_ids]
    assert streamed == whole.outputs[0].token_ids


def test_a_message_without_text_may_have_something_else_to_say():
    message = {"role": "assistant", "content": None, "tool_calls": ["look"]}
    assert ChatTemplate("{{ messages[0].tool_calls[0] }}").render([message], {}) == "look"


@pytest.mark.parametrize("pieces", [None, 5, 1.5, True, b"ab", {"a": 1}, Ellipsis], ids=repr)
@pytest.mark.parametrize("call", ["generate_from", "stream_from"])
def test_what_cannot_yield_text_is_refused_before_a_process_starts(llm, call, pieces):
    with pytest.raises(PromptError, match="pieces=.* is no text: give a file opened as text"):
        getattr(llm, call)(pieces, FEW)


@pytest.mark.parametrize(
    "params", [5, "x", 0, False, "", {}, {"temperature": 0}, [5], [None], SamplingParams], ids=repr
)
@pytest.mark.parametrize("call", ["generate", "stream", "generate_from"])
def test_sampling_params_of_another_kind_are_refused_and_not_taken_for_none(llm, call, params):
    with pytest.raises(ConfigError, match=r"sampling_params=.* must be SamplingParams\(...\)"):
        getattr(llm, call)("Hi", params)


@pytest.mark.parametrize("params", [[], (), [FEW, FEW]], ids=len)
def test_as_many_sampling_params_as_prompts_or_one(llm, params):
    with pytest.raises(PromptError, match=f"1 prompts but {len(params)} sampling_params"):
        llm.generate("Hi", params)


@pytest.mark.parametrize("number", NO_NUMBER, ids=repr)
def test_what_is_no_number_of_tokens_is_refused_with_its_name(llm, number):
    calls = {
        "start": lambda: llm.logits(IDS, number),
        "step": lambda: llm.logits(IDS, 1, number),
        "window": lambda: perplexity(llm, IDS, number, 4),
        "stride": lambda: perplexity(llm, IDS, 8, number),
        "chunk_tokens": lambda: llm.generate_from(["Hi"], FEW, number),
        "stop_token_ids": lambda: SamplingParams(stop_token_ids=[number or True]),  # 0 is a token
    }
    for name, call in calls.items():
        with pytest.raises(MinillmError) as refused:
            call()
        assert f"{name}=" in str(refused.value)


def test_an_empty_list_of_prompts_has_no_outputs(llm):
    assert llm.generate([], FEW) == llm.generate(iter(()), None) == llm.generate([], []) == llm.chat([]) == []


@pytest.mark.parametrize("value", NO_WORD, ids=repr)
@pytest.mark.parametrize("name", ["dtype", "attention", "quantization", "scheduling_policy"])
def test_what_is_no_word_is_refused_where_an_option_takes_words(name, value):
    with pytest.raises(ConfigError, match=f"{name}="):
        EngineConfig(**{name: value})
