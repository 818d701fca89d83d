"""Chat templates are strangers' code: what they may do, and that nothing else happens."""

import pytest

from shardformer.data.chat.template_process import TemplateProcess
from shardformer.errors import UsageError
from tests.data.chat.chats import CHATML, talk, template


def render(text: str, **limits) -> str:
    with TemplateProcess(template(text, bos_token="<s>"), **limits) as process:
        return process.render(talk("hi", "yo")).text


def test_it_renders_as_transformers_does():
    text = (
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }} {{ strftime_now('%d %b %Y') }}\n"
        "    {% for m in messages %}{% if loop.last %}{% break %}{% endif %}\n  {{ m.content }}\n{% endfor %}\n"
    )
    assert render(text) == '<s>{"a": "<é>"} 02 Jan 2026\n  hi\n'


def test_generation_blocks_give_spans():
    with TemplateProcess(CHATML) as process:
        found = process.render(talk("a", "bc", "d", "é😀"))
        assert [found.text[start:end] for start, end in found.spans] == ["bc<|im_end|>", "é😀<|im_end|>"]
        assert process.render(talk("a"), with_prompt=True).text.endswith("<|im_start|>assistant\n")


def test_a_generation_block_in_a_macro_is_rejected():
    with pytest.raises(UsageError, match="use no macro"):
        render("{% macro f() %}{% generation %}x{% endgeneration %}{% endmacro %}{{ 'abc' ~ f() }}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{{ 'x' * 10**12 }}", "too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('touch WRITTEN') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "cannot hold"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_a_harmful_template_is_rejected(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        render(text)
    assert not list(tmp_path.iterdir())


def test_template_of_ten_megabytes_is_rejected():
    with pytest.raises(UsageError, match="has 10,485,760 characters, more than the 262,144 of any template"):
        render("x" * (10 << 20))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}", "more than 0.2 s"),
        (
            "{% for i in range(9999) %}{% for i in range(9999) %}{{ 'x' * 99 }}{% endfor %}{% endfor %}",
            "more than 1,000",
        ),
        (
            "{% set n = namespace(a=[1]) %}{% for i in range(64) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
            "0.2 s",
        ),
        ("{{ 7 ** (9 ** 9) }}", r"its process ended|0.2 s"),
    ],
)
def test_a_bomb_ends_within_its_limits(text, message):
    with pytest.raises(UsageError, match=message):
        render(text, seconds=0.2, characters=1000)


def test_a_process_serves_after_a_failure():
    text = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}fine"
    with TemplateProcess(template(text)) as process:
        with pytest.raises(UsageError, match="no"):
            process.render(talk("a", "b"))
        assert process.render(talk("a")).text == "fine"


USES = {
    "striptags": "{{ '<b>x</b> &amp;' | striptags }}",
    "wordwrap": "{{ 'a b c' | wordwrap(1) }}",
    "lipsum": "{{ lipsum(1, html=false)[:0] }}",
    "random": "{{ [1] | random }}",
    "urlize": "{{ 'http://x.org' | urlize }}",
    "idna": "{{ 'ä'.encode('idna') }}",
    "named": "{{ 'ä'.encode('ascii', 'namereplace') }}",
    "cyrillic": "{{ 'д'.encode('koi8-r') }}",
    "chinese": "{{ '日'.encode('gb18030') }}",
    "utf": "{{ 'ä'.encode('utf-16') }}",
}


@pytest.mark.parametrize("name", USES)
def test_filters_and_methods_open_no_file_later(name):
    with TemplateProcess(template(USES[name])) as process:
        process.render(talk("hi", "ho"))
