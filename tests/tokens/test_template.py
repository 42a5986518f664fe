"""Chat templates: what they are given, and what they may not use up."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from prorld.errors import RendererError, chain
from prorld.tokens.template import ChatTemplate

USER = {"role": "user", "content": "hi"}


def rendered(source: str, **kwargs: Any) -> str:
    """A template over one message."""
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", now=lambda: datetime(2024, 2, 3))  # noqa: DTZ001
    return template.render([USER], [{"name": "f"}], add_generation_prompt=True, kwargs=kwargs)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ messages[0]['role'] }}{{ eos_token }}", "<s>hiuser</s>"),
        ("{% for m in messages %}{{ m.content }}{% if loop.last %}!{% endif %}{{ loop.length }}{% endfor %}", "hi!1"),
        ("{{ tools | tojson }}", '[{"name": "f"}]'),
        ("{{ {'b': 'é<', 'a': [1, none]} | tojson(sort_keys=true) }}", '{"a": [1, null], "b": "é<"}'),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2024"),
        ("{% if add_generation_prompt %}go{% endif %}{{ nothing }}", "go"),
        ("{{ flag }}{{ 'a' ~ 1 ~ none }}", "Truea1None"),
        (
            (
                "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}"
                "{% if i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"
            ),
            "013",
        ),
        ("{% generation %}said{% endgeneration %}", "said"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 * 3 %}{% endfor %}{{ ns.n }}",
            "6",
        ),
        ("{{ messages | map(attribute='role') | join(', ') }}", "user"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') }}", "abab"),
        ("{{ ' x '.strip() + 'a,b'.split(',')[1] + 'xyx' | replace('x', 'z') }}", "xbzyz"),
        ("  {%- if true %}\n  kept\n  {%- endif %}\n", "  kept"),
    ],
)
def test_templates_find_what_they_expect(source: str, text: str) -> None:
    """The dialect of Jinja that chat templates are written in works."""
    assert rendered(source, flag=True) == text


def test_a_template_says_why_it_refuses() -> None:
    """``raise_exception`` becomes our error with the template's words."""
    with pytest.raises(RendererError) as caught:
        rendered("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in chain(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x' | nosuch }}", "x" * 600_000, "{{" * 2000])
def test_a_template_that_is_none(source: str) -> None:
    """What can't be compiled is refused when the template is made."""
    with pytest.raises(RendererError):
        ChatTemplate(source)


def test_variables_can_not_replace_what_is_ours() -> None:
    """A job's template variables don't change messages, tokens or the meter."""
    text = rendered("{{ messages[0].content }}{{ eos_token }}", messages=[], eos_token="evil", **{"the meter": None})
    assert text == "hi</s>"


DOUBLE = "{% set ns = namespace(x=START) %}{% for i in range(80) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | tojson }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(10**12) %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set x %}{% for i in range(99999) %}" + "z" * 9999 + "{% endfor %}{% endset %}",
        "{% for i in range(99999) %}" + "z" * 9999 + "{% endfor %}",
        DOUBLE.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
        DOUBLE.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
        DOUBLE.replace("START", "['a']").replace("STEP", "ns.x + ns.x"),
        DOUBLE.replace("START", "'a'").replace("STEP", "[ns.x, ns.x]"),
        DOUBLE.replace("START", "'a'").replace("STEP", "[ns.x, ns.x] | join"),
        DOUBLE.replace("START", "'aa'").replace("STEP", "ns.x | replace('a', 'aa')"),
        DOUBLE.replace("START", "'aa'").replace("STEP", "ns.x.replace('a', 'aa')"),
        DOUBLE.replace("START", "3").replace("STEP", "ns.x * ns.x"),
        "{{ 'a' * 10**10 }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999d}'.format(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
    ],
)
def test_a_hostile_template_runs_out_before_it_runs_away(source: str) -> None:
    """Whatever multiplies work or text, or reaches for Python, ends as a ``RendererError``."""
    with pytest.raises(RendererError):
        rendered(source)


@pytest.mark.parametrize("name", ["strftime_now.__globals__", "self._TemplateReference__context", "''.__class__"])
def test_a_template_sees_no_python(name: str) -> None:
    """Names that lead out of the sandbox are undefined."""
    assert not rendered("{{ " + name + " }}")
    assert rendered("{% if " + name + " is undefined %}gone{% endif %}") == "gone"
