"""serve: the engine behind HTTP."""

from __future__ import annotations

import os

from minillm.cli.options import engine_command, open_llm
from minillm.errors import ConfigError
from minillm.option_checks import between

LONGEST_SHUTDOWN_S = 24 * 3600


def add_commands(commands) -> None:
    serve = engine_command(
        commands, "serve", run_serve, "an OpenAI-compatible HTTP server, on this machine only by default"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1, this machine only")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for a free one; default 8000")
    serve.add_argument("--api-key", help="callers must bring it; default: the environment's MINILLM_API_KEY, or none")
    serve.add_argument("--request-timeout-s", type=float, help="cut off requests that take longer; default: never")
    serve.add_argument("--max-body-bytes", type=int, default=4 * 2**20, help="refuse longer requests; default 4 MiB")
    serve.add_argument(
        "--shutdown-timeout-s", type=float, default=30.0, help="seconds for open answers at the end; default 30"
    )


def run_serve(args) -> None:
    try:
        from minillm.server.app import ServerConfig
        from minillm.server.run import listen, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'minillm-course[serve]'") from error

    ranks = max(args.engine_tensor_parallel_size or 1, args.engine_pipeline_parallel_size or 1)
    if ranks > 1 and os.environ.get("RANK", "0") != "0":
        open_llm(args)  # one of torchrun's: inside, it follows rank 0, which alone listens, and ends with it
    between("shutdown_timeout_s", args.shutdown_timeout_s, 0, LONGEST_SHUTDOWN_S)
    api_key = args.api_key if args.api_key is not None else os.environ.get("MINILLM_API_KEY")
    config = ServerConfig(api_key, args.request_timeout_s, args.max_body_bytes)
    with listen(args.host, args.port) as listener, open_llm(args) as llm:
        serve(llm, config, listener, args.shutdown_timeout_s)
