"""Text from the model: generate, chat, demo."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import BinaryIO

from minillm.cli.options import add_sampling, engine_command, engine_config, open_llm, sampling
from minillm.errors import PromptError

READ_BYTES = 1 << 16  # at a time, of a prompt that is streamed
CHAT_HINT = "hint: the text is continued as it stands, and this model was trained on messages; --chat sends it as one"
DEMO_QUESTION = "Name the capital of France."  # no step is a near tie, so rounding on no processor changes the answer


def add_commands(commands) -> None:
    generate = engine_command(
        commands, "generate", run_generate, "continue one or more texts, or answer them as messages (--chat)"
    )
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")
    stream = "instead: one prompt from a file, or - for standard input, computed while it is still being read"
    generate.add_argument("--stream-prompt", metavar="FILE", help=stream)
    generate.add_argument("--chat", action="store_true", help="send each prompt as a user's message: for questions")
    generate.add_argument("--json", action="store_true", help="print one JSON list")
    add_sampling(generate, n=int)

    chat = engine_command(commands, "chat", run_chat, "talk to the model, streaming; an empty line or Ctrl-D ends it")
    chat.add_argument("--system", help="system message")
    add_sampling(chat)

    demo = engine_command(commands, "demo", run_demo, "one answer, and where its time to first token went")
    demo.add_argument("--question", default=DEMO_QUESTION)


def run_generate(args) -> None:
    if bool(args.prompts) == bool(args.stream_prompt) or (args.chat and args.stream_prompt):
        raise PromptError("give one or more prompts, or --stream-prompt FILE (without --chat)")
    with stream_of(args) as file, open_llm(args) as llm:
        params = sampling(args, llm)
        if file:
            outputs = [llm.generate_from(pieces_of(file), params)]
            args.prompts = [args.stream_prompt]
            tell_arrival(outputs[0])
        elif args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in args.prompts]
            outputs = llm.chat(conversations, params, use_tqdm=sys.stderr.isatty())
        else:
            if llm.tokenizer.chat_template and sys.stderr.isatty():
                print(CHAT_HINT, file=sys.stderr)
            outputs = llm.generate(args.prompts, params, use_tqdm=sys.stderr.isatty())
    rows = []
    for prompt, output in zip(args.prompts, outputs, strict=True):
        whole = output.to_dict()
        for completion in output.outputs:
            rows.append(
                {
                    "prompt": prompt,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    "num_cached_tokens": output.num_cached_tokens,
                    "metrics": whole["metrics"],
                }
            )
    if args.json:
        print(json.dumps(rows, ensure_ascii=False))
        return
    for row in rows:
        print(row["text"] if len(rows) == 1 else f"--- {row['prompt']}\n{row['text']}")


def stream_of(args) -> BinaryIO | nullcontext[None]:
    """The file of --stream-prompt if it was given; "-", standard input, gives what is there without waiting for more.

    Raises ConfigError for a scheduler of whole prompts, PromptError for a file that cannot be read.
    """
    from minillm.pipeline.growing import check_cuts
    from minillm.scheduler import POLICIES

    path, config = args.stream_prompt, engine_config(args)
    if not path:
        return nullcontext()
    check_cuts(POLICIES[config.scheduling_policy].cuts_prompts(config))
    try:
        return open(0 if path == "-" else path, "rb", buffering=0, closefd=path != "-")
    except OSError as error:
        raise PromptError(f"--stream-prompt {path} cannot be read: {error.strerror}") from error


def pieces_of(file: BinaryIO) -> Iterator[str]:
    """The text of a file in pieces as they can be read."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    while data := file.read(READ_BYTES):
        yield decoder.decode(data)
    decoder.decode(b"", final=True)  # raises where the text ends in the middle of a character


def tell_arrival(output) -> None:
    """What a prompt that was computed while it arrived has saved."""
    said = output.metrics.arrival
    print(
        f"prompt: {len(output.prompt_token_ids)} tokens from {said['pieces']} pieces; tokenised in "
        f"{said['tokenize_s'] * 1e3:.1f} ms, {said['hidden_s'] * 1e3:.1f} of them while the engine computed, which "
        f"waited {said['waited_s'] * 1e3:.1f} ms for text; first token {said['ttft_after_text_s'] * 1e3:.1f} ms "
        f"after its end",
        file=sys.stderr,
    )


def run_chat(args) -> None:
    with open_llm(args) as llm:
        params = sampling(args, llm)
        messages = [{"role": "system", "content": args.system}] if args.system else []
        while True:
            try:
                text = input("you: " if sys.stdin.isatty() else "")
            except EOFError:
                return
            if not text.strip():
                return
            messages.append({"role": "user", "content": text})
            answer = ""
            for chunk in llm.stream(messages, params):
                answer += chunk.text
                print(chunk.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


def run_demo(args) -> None:
    from minillm.sampling_params import SamplingParams

    messages = [{"role": "user", "content": args.question}]
    with open_llm(args) as llm:
        llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)  # warm up once
        llm.reset_prefix_cache()  # and do not let the prefix cache answer for it
        print(f"question  {args.question}\nanswer    ", end="", flush=True)
        output = None
        for chunk in llm.stream(messages, SamplingParams(temperature=0.0, max_tokens=64), profile=True):
            print(chunk.text, end="", flush=True)
            output = chunk.output or output
        metrics = output.metrics
        parts = " + ".join(f"{name.replace('_', ' ')} {s * 1e3:.1f}" for name, s in metrics.ttft_parts.items())
        rate = f"{1 / metrics.tpot_s:.1f} tok/s" if metrics.tpot_s else "a single token"
        print(f"\nTTFT      {metrics.ttft_s * 1e3:.1f} ms = {parts} (prompt: {len(output.prompt_token_ids)} tokens)")
        print(f"decode    {rate} after the first token")
        print(f"attention {llm.reasons['attention']}")
        print(f"weights   {llm.reasons['weights']}")
