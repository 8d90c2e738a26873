"""An OpenAI-compatible HTTP server around one engine: `minillm serve`. Needs the `serve` extra.

    client --HTTP--> app.py --prompt, params--> engine_thread.py --steps--> Engine
                     event loop, never blocks   the one thread that drives the engine

`protocol.py` says what a request may hold, `invalid.py` what is wrong with one, `answers.py` what comes back and
`streams.py` turns it into server-sent events; `key.py` and `body_limit.py` guard the door, `metrics.py` counts,
`run.py` starts and drains.
"""
