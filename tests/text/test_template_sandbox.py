"""The sandbox of chat templates: it writes what transformers writes, and its process is limited."""

import pytest

from spec_lab.text import chat_template
from spec_lab.text.chat_template import SANDBOX, ChatTemplate
from spec_lab.text.prompts import Prompt
from spec_lab.text.template_sandbox import rendered, variables
from tests.text.test_conversations import text, tokenizer

MESSAGES = [{"role": "system", "content": "s <&> é"}, {"role": "user", "content": " a\nb "}]
TOOLS = [{"name": "f", "parameters": {"type": "object", "n": [1, None, True]}}]
FEATURES = """
{%- macro show(one, deep=1) %}<{{ one.role | upper }}>{{ one['content'].strip() }}{% endmacro %}
{%- set ns = namespace(n=0, seen=[]) %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- for one in messages %}
    {%- if loop.first %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 2 * loop.index0 ** 2 %}
    {%- set ns.seen = ns.seen + [one.role] %}
    {% generation %}{{ show(one) }}{% endgeneration %}
{%- endfor %}
{{ tools | tojson(indent=2) }} {{ tools | tojson }} {{ tools[0].parameters.n }}
{{ ns.n ~ '-' ~ (ns.seen | join(', ')) ~ none }} {{ '%s: %5.1f' % ('x', 1.25) }} {{ '{:>5}|{a}'.format(3, a=[1]) }}
{{ 'ab'.replace('b', 'cc').center(9) }}{{ 'x' | indent(4, true) }}{{ 'k: %s' | format(3) }}{{ [1, 2] | sum }}
{%- set block %}{{ bos_token }}{% for a, b in dict(x=1, y=2).items() %}{{ a }}={{ b }}{% endfor %}{% endset %}
{{ block * 2 }}{{ messages | map(attribute='role') | list | string }}{{ messages[-1]['content'][1:] | trim | length }}
{{ [3, 1] | sort | last }}
{{ 2.567 | round(1) }}{{ 'a' | replace('a', '<') }}{{ [1, 2, 3] | batch(2) | list }}{{ 7 % 4 }}
{% macro box() %}[{{ caller() }}]{% endmacro %}{% call box() %}c{% endcall %}
{{ messages | selectattr('role', 'equalto', 'user') | list | count }}
{{ 'é\t' | pprint }}{{ dict.fromkeys([1, 2], 'a') }}
{{ 'a'.encode() }}{{ 'a,b'.split(',') | map('upper') | join('|') }}{{ {'a': none}.items() }}{{ namespace(x=1).x }}
"""


def test_it_writes_what_transformers_writes():
    backend = tokenizer(FEATURES)
    expected = backend.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    given = {"messages": MESSAGES, "tools": TOOLS, "documents": None, "add_generation_prompt": True}
    given |= backend.special_tokens_map
    assert SANDBOX.ask({"source": FEATURES, "given": given}, chat_template.LIMITS) == expected


LISTS = "{% set a = [0] %}" + "{% set a = [a, a] %}" * 60 + "{% set b = [0] %}" + "{% set b = [b, b] %}" * 60
TUPLES = LISTS.replace("[0]", "0").replace("[a, a]", "(a, a)").replace("[b, b]", "(b, b)")
LONG = "{% set a = 'x' * 50000000 %}"
HOSTILE = {
    "in": LISTS + "{{ a in [b] }}",
    "is eq": LISTS + "{{ a is eq(b) }}",
    "sort": LISTS + "{{ [a, b] | sort | length }}",
    "unique": TUPLES + "{{ [a, b] | unique | list | length }}",
    "keys": TUPLES + "{{ {a: 1, b: 2} | length }}",
    "upper": LONG + "{% for n in range(9000) %}{% set b = a | upper %}{% endfor %}",
    "center": "{{ 'a' | center(6000000000) }}",
    "replace": "{% set a = 'xx' %}" + "{% set a = a | replace('x', a) %}" * 8,
    "namespace": LISTS + "{{ namespace(a=a) }}",
    "view": LISTS + "{{ {1: a}.values() }}",
    "chain": "{{ 1" + " < 1" * 50_000 + " }}",
    "sum": "{% set a = [0] %}" + "{% set a = a + a %}" * 60,
    "join": "{% set a = 'x' %}" + "{% set a = [a, a] | join(a) %}" * 40,
    "block": "{% set a = 'x' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "format": "{{ '%6000000000d' % 1 }}",
    "JSON": LISTS + "{{ a | tojson }}",
    "number": "{{ 7**30000000**3 }}",
    "loop": "{% set n = range(90000) | list %}" + "{% for a in n %}" * 4 + "{% endfor %}" * 4,
    "text": "{% for a in range(90000) %}{{ 'x' * 100000 }}{% endfor %}",
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("how", HOSTILE)
def test_a_template_above_a_limit_is_stopped(how, monkeypatch):
    monkeypatch.setattr(
        chat_template, "LIMITS", chat_template.ProcessLimits(cpu_seconds=0.3, memory=2**29, seconds=100.0)
    )
    limit = r"(runs for more than 0.3 seconds of CPU time|needs more than 512 MiB of memory)"
    with pytest.raises(ValueError, match=rf"prompt 'p': the chat template of the target is stopped: it {limit}"):
        text(Prompt("p", "a", template=ChatTemplate()), template=HOSTILE[how])
    assert text(Prompt("p", "a", template=ChatTemplate()), template="{{ messages[0].content }}") == "a"


@pytest.mark.parametrize("template", ["{{ ''.__class__.x }}", "{{ namespace(_a=1) }}", "{{ lipsum(9) }}",
                                      "{{ [1] | random }}", "{{ [].append(1) }}"])  # fmt: skip
def test_what_templates_do_not_need_is_missing(template):
    with pytest.raises(Exception):  # noqa: B017
        rendered(template, {})


def test_variables_are_those_that_are_read():
    assert {"messages", "tools", "bos_token"} <= set(variables(FEATURES))
    assert "tools" not in variables("{# tools #}tools {{ messages[0].tools }}{% set tools = 1 %}{{ tools }}")
    assert "thinking" in variables("{% if thinking is defined and thinking %}a{% endif %}")
