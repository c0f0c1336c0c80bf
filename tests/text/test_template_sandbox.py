"""The sandbox of chat templates: it writes what transformers writes, within bounds."""

import time

import pytest

from spec_lab.text import template_sandbox
from spec_lab.text.template_sandbox import MAX_WIDTH, rendered, variables
from tests.text.test_conversations import tokenizer

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
"""


def test_it_writes_what_transformers_writes():
    own = tokenizer(FEATURES)
    expected = own.apply_chat_template(MESSAGES, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    given = {"messages": MESSAGES, "tools": TOOLS, "documents": None, "add_generation_prompt": True}
    assert rendered(FEATURES, {**own.special_tokens_map, **given}) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ 7**30000000**3 }}",
        "{% set n = 7 ** 3000 %}{{ n * n }}",
        "{{ 'a' * 6000000000 }}",
        "{{ 6000000000 * 'a' }}",
        "{% set n = [0] * 6000000000 %}",
        "{{ '%6000000000d' % 1 }}",
        "{{ '%.6000000000f' % 1 }}",
        "{{ '%*d' % (6000000000, 1) }}",
        "{{ '%6000000000d' | format(1) }}",
        "{{ '{:>6000000000}'.format(1) }}",
        "{{ '{:>{n}}'.format(1, n=6000000000) }}",
        "{{ '{a:>6000000000}'.format_map({'a': 1}) }}",
        "{{ 'a'.ljust(6000000000) }}",
        "{{ 'a'.rjust(6000000000) }}",
        "{{ 'a'.center(6000000000) }}",
        "{{ 'a'.zfill(6000000000) }}",
        "{{ 'a' | center(6000000000) }}",
        "{{ 'a\nb' | indent(6000000000) }}",
        "{{ [1] | tojson(indent=6000000000) }}",
        "{{ 1 | round(6000000000, 'ceil') }}",
        "{{ [1] | batch(6000000000, 0) | list }}",
        "{{ [1] | slice(6000000000) | list }}",
        "{{ range(6000000000) }}",
    ],
)
def test_long_results_are_refused_before_they_are_computed(template):
    with pytest.raises(OverflowError):
        rendered(template, {})


TWICE = {
    "a + a": "{% set a = 'x' %}" + "{% set a = a + a %}" * 60,
    "lists": "{% set a = [0] %}" + "{% set a = a + a %}" * 60,
    "a ~ a": "{% set a = 'x' %}" + "{% set a = a ~ a %}" * 60,
    "a block": "{% set a = 'x' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "join": "{% set a = 'x' %}" + "{% set a = [a, a] | join(a) %}" * 40,
    "str.join": "{% set a = 'x' %}" + "{% set a = a.join([a, a]) %}" * 40,
    "replace": "{% set a = 'xx' %}" + "{% set a = a | replace('x', a) %}" * 8,
    "str.replace": "{% set a = 'xx' %}" + "{% set a = a.replace('x', a) %}" * 8,
    "%": "{% set a = 'x' %}" + "{% set a = '%s%s' % (a, a) %}" * 60,
    "format": "{% set a = 'x' %}" + "{% set a = '{0}{0}'.format(a) %}" * 60,
    "a list's text": "{% set a = [0] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "a list as a text": "{% set a = [0] %}" + "{% set a = [a, a] %}" * 60 + "{% set b = a | string %}",
    "a list as JSON": "{% set a = [0] %}" + "{% set a = [a, a] %}" * 60 + "{{ a | tojson }}",
    "a loop": "{% for a in range(900) %}{% for b in range(900) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", TWICE)
def test_what_doubles_is_stopped(how, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_WRITTEN", 2_000_000)
    begun = time.process_time()
    with pytest.raises(OverflowError, match="writes more than 2000000 characters"):
        rendered(TWICE[how], {})
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a'.encode().center(9) }}", "{{ (1).to_bytes(600000000) }}", "{{ 'a'.expandtabs(9) }}",
        "{{ 'a'.translate({97: 'b'}) }}", "{{ ''.__class__.x }}", "{{ namespace(_a=1) }}", "{{ lipsum(9) }}",
        "{{ [[1], [2]] | sum(start=[]) }}", "{{ [].append(1) }}", "{{ strftime_now('%999999999Y') }}",
    ],
)  # fmt: skip
def test_what_templates_do_not_need_is_missing(template):
    with pytest.raises(Exception):  # noqa: B017
        rendered(template, {})


def test_each_rendering_begins_with_the_whole_bound(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_WRITTEN", 70)
    for _ in range(5):
        assert rendered("{{ 'ab' * 10 }}x", {})[-1] == "x"


def test_long_conversations_are_far_from_the_bound():
    template = (
        "{% for one in messages %}{% if one.content.startswith('a') and '%s' % one.role != 'x' %}"
        "{{ '{}: {}'.format(one.role, one.content.strip()) | indent(2) }}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a\n" * 5000}] * 1000  # 10 million characters
    assert len(rendered(template, {"messages": messages})) > 10**7


def test_widths_up_to_the_bound_are_allowed():
    assert len(rendered(f"{{{{ 'a'.ljust({MAX_WIDTH}) }}}}", {})) == MAX_WIDTH


def test_variables_are_those_that_are_read():
    assert variables(FEATURES) >= {"messages", "tools", "bos_token"}
    assert "tools" not in variables("{# tools #}tools {{ messages[0].tools }}{% set tools = 1 %}{{ tools }}")
    assert "thinking" in variables("{% if thinking is defined and thinking %}a{% endif %}")


@pytest.mark.parametrize(
    "template",
    [
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
        "{% macro a() %}{{ thinking }}{% endmacro %}{% set thinking = thinking | default(true) %}{{ a() }}",
    ],
)
def test_a_variable_with_a_default_is_read(template):
    assert variables(template) == {"thinking"}
