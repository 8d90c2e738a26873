"""A server of random weights in a thread of the test's own process, so that a test can look into its engine."""

import threading
import time

import httpx
import openai
import uvicorn

from minillm import LLM
from minillm.server.app import make_app
from minillm.server.run import listen

MODEL = "random:tiny"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
WAIT_S = 120  # for what takes a second on an idle machine


def make_llm(**options):
    llm = LLM(MODEL, **{"dtype": "float32", "num_kv_blocks": 200, **options})
    llm.tokenizer.chat_template = TEMPLATE
    return llm


class Running:
    """`with Running(...) as running:` serves at `running.url` until the block ends."""

    def __init__(self, config=None, **options):
        self.llm = make_llm(**options)
        self.engine = self.llm.engine
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(make_app(self.llm, config), lifespan="on", log_level="warning"))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        return self

    def __exit__(self, *exc_info):
        self.http.close()
        self.client.close()
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self.listener.close()

    @property
    def pool(self):
        return self.engine.scheduler.block_pool

    def is_idle(self):
        return not self.engine.has_work and self.pool.num_free == self.pool.num_blocks

    def slow_down(self, seconds):
        """Every forward pass takes this much longer: a bigger model, to the server's eyes."""
        forward = self.engine.model.forward

        def slow(*args, **kwargs):
            time.sleep(seconds)
            return forward(*args, **kwargs)

        self.engine.model.forward = slow


def until(condition, message="waited in vain"):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, message
        time.sleep(0.005)
