"""Chat templates: rendered as transformers renders them, sandboxed, and every failure a PromptError."""

import subprocess
import sys

import pytest

from minillm.errors import PromptError
from minillm.tokenizer import Tokenizer
from minillm.tokenizer.bpe import BYTE_TO_CHAR
from tests.unit.tokenizer_oracles import SPECIAL_TOKENS, library_tokenizer, library_trainer, save

TEMPLATES = {
    "system_prompt": "{% if messages[0]['role'] != 'system' %}{{ bos_token }}system{% endif %}"
    "{% for m in messages %}\n  {{ m.role | upper }}: {{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}",
    "blocks": "  {% for m in messages %}\n    {% if loop.index0 == 1 %}\n      {% continue %}\n    {% endif %}\n"
    "{{ m.content }}\n  {% if loop.last %}\n last{% break %}\n  {% endif %}\n  {% endfor %}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }} {{ tools is none }} {{ mode }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }} {{ strftime_now('%Y') }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}",
}
CONVERSATION = [
    {"role": "user", "content": " Is 1 < 2 & 'ü' > \"u\"? "},
    {"role": "assistant", "content": "Yes.\n"},
    {"role": "user", "content": "<|end|> 😀"},
]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("home", ["tokenizer_config", "list", "jinja_file"])
def test_chat_templates_render_as_in_transformers(template, home, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>"}
    if home == "jinja_file":
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif home == "list":
        others = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": template}]
        config["chat_template"] = others
    else:
        config["chat_template"] = template
    library = library_tokenizer("gpt2")
    library.train_from_iterator(["a"], library_trainer(300, SPECIAL_TOKENS))
    save(library, tmp_path, tokenizer_config=config)
    reference = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    ours = Tokenizer.from_tokenizer_json(tmp_path)
    for add_generation_prompt in (True, False):
        options = {"add_generation_prompt": add_generation_prompt, "mode": "fast"}
        expected = reference.apply_chat_template(CONVERSATION, tokenize=False, **options)
        assert ours.apply_chat_template(CONVERSATION, **options) == expected


def with_template(template: str | None) -> Tokenizer:
    return Tokenizer(list(BYTE_TO_CHAR), [], chat_template=template)


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "no chat template"),
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "refused the messages: TemplateError: roles must alternate"),
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_is_reported(template, message):
    with pytest.raises(PromptError, match=message):
        with_template(template).apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("messages", [[], "Hi", {"role": "user"}, ["Hi"], [{"content": "Hi"}], [{"role": 3}], None])
def test_messages_of_another_shape_are_refused(messages):
    with pytest.raises(PromptError, match="list of dictionaries|is not a message"):
        with_template("{{ messages }}").apply_chat_template(messages)


def test_a_template_cannot_change_the_callers_messages():
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(PromptError, match="SecurityError"):
        with_template("{{ messages[0].update(content='x') }}").apply_chat_template(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_jinja_waits_for_the_first_chat():
    code = "import sys; from minillm.tokenizer import Tokenizer; Tokenizer.bytes_only().encode('a'); "
    code += "print('jinja2.sandbox' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
