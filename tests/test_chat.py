"""Chat templates: the same text as transformers renders, in a sandbox, with named errors."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tidegate.errors import CheckpointError, UsageError
from tidegate.models.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <b>1 & 1</b>? “é”"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Sure?"},
]
CHATML = """{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% set ns = namespace(system='') %}
    {% for message in messages %}
        {% if message.role == 'system' %}{% set ns.system = message.content.strip() + '\\n\\n' %}{% continue %}{% endif %}
        {% if message.role == 'user' %}[INST] {{ ns.system }}{{ message.content }} [/INST]{% set ns.system = '' %}
        {% elif message.role == 'assistant' %}{% generation %} {{ message.content }}{{ eos_token }}{% endgeneration %}
        {% else %}{{ raise_exception('Only user and assistant roles!') }}{% endif %}
        {% if loop.index > 20 %}{% break %}{% endif %}
    {% endfor %}"""
TOOLS = "{% for tool in tools %}{{ tool | tojson }}|{{ tool | tojson(indent=2) }}{% endfor %}{{ messages[0].content | upper }}"
TOOL = [{"name": "größe", "parameters": {"a": [1, "<"], "b": None}}]


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize(("template", "options"), [(CHATML, {}), (MISTRAL, {}), (TOOLS, {"tools": TOOL})])
def test_the_text_is_that_of_transformers(template, options, generate):
    ours = ChatTemplate(template, SPECIAL).render(MESSAGES, generate, **options)
    theirs, _ = render_jinja_template(
        conversations=[MESSAGES], chat_template=template, add_generation_prompt=generate, **SPECIAL, **options
    )
    assert ours == theirs[0]


def test_dates_and_options():
    template = ChatTemplate("{{ strftime_now('%Y') }} {{ enable_thinking }} {{ nope is defined }}", {})
    year, thinking, defined = template.render(MESSAGES, enable_thinking=True).split()
    assert 2000 < int(year) < 3000 and (thinking, defined) == ("True", "False")


def test_without_a_template_messages_are_joined():
    template = ChatTemplate(None, SPECIAL)
    assert template.is_default
    assert template.render(MESSAGES[:2]) == "Be brief.\nWhat is <b>1 & 1</b>? “é”\n"


def test_a_refusal_is_the_users_error():
    with pytest.raises(UsageError, match=r"template of m\.gguf refuses these messages: Only user"):
        ChatTemplate(MISTRAL, SPECIAL, "m.gguf").render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("messages", [["hello"], [{"content": "no role"}], [{"role": "user", "content": 3}]])
def test_what_is_no_message(messages):
    with pytest.raises(UsageError, match="message 0"):
        ChatTemplate(None, SPECIAL).render(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "line 1"),
        ("a\n{{ oops", "line 2"),
        ("{% generation %} never ends", "line 1"),
    ],
)
def test_a_template_that_does_not_parse(template, message):
    with pytest.raises(CheckpointError, match=rf"m\.gguf: chat template, {message}"):
        ChatTemplate(template, SPECIAL, "m.gguf")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list | length }}",
        "{{ messages[99].content }}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_a_template_that_fails_or_breaks_out(template):
    with pytest.raises(CheckpointError, match="the chat template failed"):
        ChatTemplate(template, SPECIAL).render(MESSAGES)
