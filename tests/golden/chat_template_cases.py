"""chat_templates/*.json: what transformers makes of conversations with chat_templates/*.jinja.

    python tests/golden/chat_template_cases.py

The templates have the form of each family's published one: its loops, tests, white space and tokens. cases.json:
"conversations", "options" (what apply_chat_template gets), and of each template "cases": {"conversation", "options" (their
places), "text", or "error": true where it refuses, "spans" and "ids", "mask" of the one that marks generations}. language.json:
pieces of the language with what jinja2 makes of them, and whether that is an error.
"""

import json
import re
from datetime import datetime
from pathlib import Path

import jinja2
import transformers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

HERE = Path(__file__).parent
OUT = HERE / "chat_templates"
NOW = 1732449600  # 2024-11-24 12:00:00 UTC


class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, tz)


chat_template_utils.datetime = Clock

U, A, S, T = "user", "assistant", "system", "tool"


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def called(name, arguments, content="", ident="abcdefg12", **more):
    call = {"type": "function", "id": ident, "function": {"name": name, "arguments": arguments}}
    return {"role": A, "content": content, "tool_calls": [call], **more}


WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "  Tells the weather of a place, <b>now</b> & \"soon\".\n",
    "parameters": {"type": "object", "properties": {
        "place": {"type": "string", "description": "Stadt, e.g. K\u00f6ln \U0001f327"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["place"]}}}
SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Searches in a long description that the template cuts at sixty characters or so.",
    "parameters": {"type": "object", "properties": {
        "words": {"type": "array", "items": {"type": "string"}}, "limit": {"type": "integer", "default": 10},
        "ratio": {"type": "number", "minimum": 0.5, "maximum": 1e-07}, "exact": {"type": "boolean", "default": False},
        "where": {"type": "object", "properties": {"b": {"type": "null"}, "A": {"type": "array"}}}}, "required": []},
    "return": {"type": "object"}}}

CONVERSATIONS = [
    [turn(U, "Hi")],
    [turn(U, "Hi"), turn(A, "Hello!"), turn(U, "How are you?")],
    [turn(U, "Hi"), turn(A, "Hello!")],
    [turn(S, "Be brief."), turn(U, "What is 1 + 1?")],
    [turn(S, "  Be brief. \n"), turn(U, " What is\n 1 + 1? "), turn(A, " 2 \n"), turn(U, "\nAnd 2 + 2?\n"), turn(A, "4")],
    [turn(S, ""), turn(U, "")],
    [turn(U, "caf\u00e9 \u4e2d\u6587 \U0001f600 \u05e9\u05dc\u05d5\u05dd\u00a0\u2003"), turn(A, "\u00a0na\u00efve\u3000")],
    [turn(U, "{{ messages }} {% raw %} {# x #} <|im_end|> </s> \\n 'quotes' \"double\" \t tab")],
    [turn(A, "I begin."), turn(U, "You do.")],
    [turn(U, "one"), turn(U, "two")],
    [turn(U, "Where?"), turn(A, "There."), turn(S, "Be polite."), turn(U, "Thanks")],
    [turn(U, "Weather?"), called("get_weather", {"place": "K\u00f6ln", "unit": "celsius"}),
     turn(T, "{\"temperature\": 11.5}", tool_call_id="abcdefg12"), turn(A, "It is 11.5 degrees.")],
    [turn(S, "Use tools."), turn(U, "Weather?"), called("get_weather", {"place": "Bonn"}, "Let me look."),
     turn(T, {"temperature": -3, "wind": [1.0, 2.5e-7, 1e22], "ok": True, "none": None}, tool_call_id="abcdefg12"),
     turn(T, "second", tool_call_id="abcdefg13"), turn(A, "Cold."), turn(U, "And in Rome?")],
    [turn(U, "Q"), turn(A, "<think>\nLet me think.\n</think>\n\nAnswer."), turn(U, "Q2"),
     turn(A, "<think>Again</think>Answer 2")],
    [turn(U, "Q"), turn(A, "Answer", reasoning_content="Because."), turn(U, "Q2"), turn(A, "Two", reasoning_content="\nSo.\n")],
    [turn(U, [{"type": "text", "text": " What is this? "}, {"type": "image"}, {"type": "text", "text": "And this?"}])],
    [turn(S, [{"type": "text", "text": "See."}]), turn(U, [{"type": "image"}, {"type": "text", "text": "Look"}]), turn(A, "A cat")],
    [turn(U, "x" * 300 + "\n" * 3), turn(A, "y" * 100)],
    [called("search", {"words": ["a", "b"], "limit": 3, "where": {}}, None), turn(U, "ok")],
    [turn(U, "a"), {"role": A, "content": "c", "tool_calls": []}, turn(U, "b")],
    [turn(U, "a"), {"role": A, "content": "two", "tool_calls": [
        {"id": "123456789", "function": {"name": "search", "arguments": "{\"words\": 1}"}},
        {"id": "987654321", "function": {"name": "get_weather", "arguments": {"place": "\u2028\u0007"}}}]}],
    [turn("critic", "I do not count."), turn(U, "Hm")],
    [turn(S, "s"), turn(U, "u1"), turn(A, "a1"), turn(U, "u2"), turn(A, "a2"), turn(U, "u3"), turn(A, "a3"), turn(U, "u4")],
    [turn(U, None), turn(A, "nothing was said")],
]
DOCUMENTS = [{"title": "the king's (new) book", "text": "Once\nupon"}, {"title": "\u00fcber-alles", "text": "a time \U0001f600"}]
OPTIONS = [
    {},
    {"add_generation_prompt": True},
    {"tools": [WEATHER, SEARCH], "add_generation_prompt": True},
    {"tools": [SEARCH], "documents": DOCUMENTS},
    {"documents": DOCUMENTS, "variables": {"enable_thinking": False, "date_string": "1 Jan 2000", "builtin_tools": ["code_interpreter", "search"]},
     "add_generation_prompt": True},
    {"tools": [WEATHER], "variables": {"tools_in_user_message": False}},
    {"variables": {"bos_token": "<BOS>", "eos_token": ""}},
]


def apply(tokenizer, template, conversation, options, **more):
    given = dict(options)
    # Variables, so that the tokenizer has no tokens but its own.
    variables = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **given.pop("variables", {})}
    return tokenizer.apply_chat_template(conversation, chat_template=template, **given, **variables, **more)


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace('},{"c', '},\n{"c') + "\n")


def cases():
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizers/qwen2/tokenizer.json"))
    templates = {}
    for path in sorted(OUT.glob("*.jinja")):
        source = path.read_text()
        found = []
        for c, conversation in enumerate(CONVERSATIONS):
            # Every option meets every template, in turn.
            for o in sorted({(c + len(templates)) % len(OPTIONS), (3 * c + 1) % len(OPTIONS)}):
                case = {"conversation": c, "options": o}
                try:
                    case["text"] = apply(tokenizer, source, conversation, OPTIONS[o], tokenize=False)
                except (jinja2.exceptions.TemplateError, TypeError):
                    case["error"] = True
                if path.stem == "marked" and "text" in case:
                    out = apply(tokenizer, source, conversation, OPTIONS[o], tokenize=True, return_dict=True,
                                return_assistant_tokens_mask=True)
                    case["ids"], case["mask"] = out["input_ids"], out["assistant_masks"]
                found.append(case)
        templates[path.stem] = found
    write(OUT / "cases.json", {"now": NOW, "transformers": transformers.__version__, "jinja2": jinja2.__version__,
                               "conversations": CONVERSATIONS, "options": OPTIONS, "templates": templates})
    count = sum(len(found) for found in templates.values())
    print(count, "cases,", sum("error" in case for found in templates.values() for case in found), "errors")


CONTINUED = [
    ("llama3", [turn(U, "Hi"), turn(A, "I was going to ")]),
    ("qwen2", [turn(U, "Hi"), turn(A, "I was  ")]),
    ("marked", [turn(U, "again again"), turn(A, "again")]),
    ("gemma", [turn(U, "Hi"), turn(A, "I was \n ")]),
]

VARIABLES = {
    "n": 7, "f": 2.5, "big": 1e16, "tiny": 1.5e-7, "whole": 3.0, "s": "Hello, World", "u": "\u00dcber stra\u00dfe \u4e2d\U0001f600",
    "e": "", "t": True, "no": False, "none": None, "l": [3, 1, 2], "words": ["b", "A", "c", "B"], "pad": "  x y  ",
    "d": {"b": 1, "a": {"x": [1, {"y": None}]}, "items": "taken", "C": 2.0}, "lines": "one\n\n two\r\nthree\n",
    "people": [{"name": "Ann", "age": 30, "tags": ["x"]}, {"name": "bob", "age": 5}, {"name": "Cy", "age": 30, "tags": []}],
    "q": "it's \"so\" \\ \t\u0001\u007f\u00a0", "nested": [[1, [2]], []], "zero": 0, "neg": -7,
}

SNIPPETS = r"""
{{ n + 1 }} {{ n - 10 }} {{ n * 2 }} {{ n / 2 }} {{ n // 2 }} {{ n % 4 }} {{ n ** 2 }} {{ 2 ** -1 }} {{ -n // 2 }} {{ -n % 4 }} {{ neg // -2 }} {{ neg % -4 }}
{{ f * 2 }} {{ f // 1 }} {{ -f % 2 }} {{ 7.5 // -2 }} {{ big }} {{ tiny }} {{ whole }} {{ 1e5 }} {{ 123456789.125 }} {{ 1/3 }} {{ 0.1 + 0.2 }} {{ 1e22 }} {{ 1_000 }} {{ 5e-324 }} {{ 100000000000000000000.0 }}
{{ t + 1 }} {{ t * 3 }} {{ true and 3 }} {{ false or 'x' }} {{ none or 0 }} {{ not n }} {{ not none }} {{ '' and 1 }}|
{{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' == 'a' }} {{ [1,2] == [1,2] }} {{ [1] == (1,) }} {{ d == d }} {{ none == none }} {{ x == y }} {{ 'a' != 1 }} {{ {'a': 1} == {'a': true} }}
{{ 1 < 2 < 3 }} {{ 3 > 2 > 2 }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ 1 <= 1 >= 1 }} {{ 'Z' < 'a' }} {{ (1, 'b') < (1, 'c') }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ 1 + 'a' }}
{{ 'a' + 1 }}
{{ 'a' ~ 1 ~ none ~ [1] ~ x ~ 2.0 }}
{{ 1 ~ 2 + 3 }}
{{ 1 ~ 2 * 3 }} {{ 'a' * 3 }} {{ 3 * 'ab' }} {{ [1] * 2 }} {{ 'a' * -1 }}| {{ 'x' 'y' "z" }}
{{ 'ell' in s }} {{ 'x' not in s }} {{ 3 in l }} {{ 'b' in d }} {{ 'q' in d }} {{ '' in e }}
{{ 1 in none }}
{{ 3 in 'abc' }}
{{ 'a' in x }} {{ 'a' not in x }} {{ 1.0 in l }} {{ [2] in nested[0] }}
{{ 5 if n > 3 else 6 }} {{ 5 if n < 3 }}| {{ 'a' if no else 'b' if no else 'c' }}
{{ l[0] }} {{ l[-1] }} {{ l[5] }}| {{ s[0] }} {{ s[-1] }} {{ u[1] }} {{ u[-1] }} {{ d['b'] }} {{ d['zz'] }}| {{ d.a.x[1].y }} {{ l['a'] }}|
{{ s[1:4] }} {{ s[:-2] }} {{ s[::-1] }} {{ l[1:] }} {{ l[::-1] }} {{ l[::2] }} {{ u[2:9] }} {{ l[:100] }} {{ l[-100:1] }} {{ s[10:2] }}| {{ s[10:2:-3] }} {{ l[5:] }} {{ (1,2,3)[1:] }} {{ u[::-2] }} {{ s[none:3] }}
{{ l[::0] }}
{{ s['a':] }}
{{ d[1:2] }}|
{{ x }}|{{ x.y }}
{{ d.zz }}|{{ d.zz.y }}
{{ x['a'] }}
{{ x() }}
{{ n() }}
{{ x + 1 }}
{{ d.items }}
{{ d['items'] }} {{ d.items() | list }} {{ d.keys() | list }} {{ d.values() | list }} {{ d.get('b') }} {{ d.get('zz') }} {{ d.get('zz', 5) }} {{ d.items() | length }}
{{ [1, 'a', none, true, 2.0, {'k': (1,)}, [], (), {}] }} {{ (1, 2) }} {{ (1) }} {{ () }} {{ 1, 2 }} {{ (1,) }}
{{ {'a': 1, 'b': [2], 3: 'c', none: 1, true: 2} }} {{ {'a': 1, 'a': 2} }} {{ {1: 'a', 1.0: 'b'} }} {{ {}.a }}|
{{ q }} {{ [q] }} {{ ["it's"] }} {{ ['"'] }} {{ [u] }} {{ ['\u200b\ue000\U0001f600\xad'] }}
{{ 'a\nb\t\\ \x41 \u00e9 \101 \q \'' }} {{ "it's \"x\"" }}
{{ -1|abs }} {{ - 1 | abs }} {{ +n }} {{ -(-n) }} {{ not n == 7 }} {{ not (n == 8) and true }}
{{ -'a' }}
{{ s|upper }} {{ u|upper }} {{ u|lower }} {{ s|lower }} {{ u|title }} {{ s|capitalize }} {{ 'HELLO wORLD-foo (bar) [x'|title }} {{ 'ß'|upper }} {{ 'ǆ'|title }} {{ 'ΑΣ'|lower }} {{ e|capitalize }}|
{{ pad|trim }}| {{ 'xxaxx'|trim('x') }} {{ 5|trim }} {{ none|trim }} {{ '\u00a0\u2003\x1ca\u3000'|trim }}|
{{ s|length }} {{ u|length }} {{ l|length }} {{ d|length }} {{ x|length }} {{ s|count }}
{{ n|length }}
{{ none|length }}
{{ (l|map('string'))|length }}
{{ x|default('dflt') }} {{ none|default('q') }} {{ none|default('q', true) }} {{ e|d('z', boolean=true) }} {{ x|d }}| {{ s|default('a') }}
{{ l|join }} {{ l|join(', ') }} {{ people|join('-', attribute='name') }} {{ s|join('.') }} {{ d|join(',') }} {{ [1, none, x, 'a']|join('|') }} {{ x|join('a') }}| {{ [[1], 2.5]|join }}
{{ s|replace('l', 'L') }} {{ s|replace('l', 'L', 1) }} {{ s|replace('', '-') }} {{ s|replace('', '-', 2) }} {{ 5|replace(5, 6) }} {{ 'aaa'|replace('aa', 'b') }}
{{ l|first }} {{ l|last }} {{ s|first }} {{ u|last }} {{ []|first }}| {{ []|last }}| {{ d|first }} {{ e|first }}|
{{ l|list }} {{ s[:3]|list }} {{ d|list }} {{ range(3)|list }} {{ x|list }} {{ (1,2)|list }}
{{ none|list }}
{{ l|sort }} {{ l|sort(reverse=true) }} {{ words|sort }} {{ words|sort(case_sensitive=true) }} {{ people|sort(attribute='age')|map(attribute='name')|list }} {{ people|sort(true, attribute='name')|map(attribute='name')|join }}
{{ [1,'a']|sort }}
{{ l|reverse|list }} {{ s|reverse }} {{ u|reverse }} {{ l|max }} {{ l|min }} {{ words|max }} {{ words|min(case_sensitive=true) }} {{ []|max }}| {{ people|max(attribute='age') }} {{ l|sum }} {{ people|sum(attribute='age') }} {{ l|sum(start=1.5) }} {{ words|unique|list }} {{ words|unique(true)|list }}
{{ l|map('string')|list }} {{ words|map('upper')|join(',') }} {{ people|map(attribute='tags')|list }} {{ people|map(attribute='tags', default=[])|list }} {{ words|map('replace', 'b', 'x')|list }} {{ words|map('default', 'z')|first }}
{{ l|select|list }} {{ [0,1,'',none,'a']|select|list }} {{ [0,1]|reject|list }} {{ l|select('odd')|list }} {{ l|reject('odd')|list }} {{ l|select('gt', 1)|list }} {{ l|select('in', [1, 2])|list }}
{{ people|selectattr('age', 'equalto', 30)|map(attribute='name')|list }} {{ people|rejectattr('age', 'eq', 30)|map(attribute='name')|list }} {{ people|selectattr('tags')|list|length }} {{ people|selectattr('tags', 'defined')|list|length }} {{ people|rejectattr('tags', 'undefined')|list|length }} {{ people|selectattr('name', 'ne', 'Ann')|list|length }}
{{ 'yes' if people|selectattr('age', 'equalto', 99) else 'no' }} {% set g = l|select %}{{ g|list }}{{ g|list }} {% set h = l|map('abs') %}{{ h|first }}{{ h|first }}{% for i in h %}[{{ i }}]{% endfor %}
{{ people|map(attribute='tags.0')|list }}
{{ people[:1]|map(attribute='tags.0')|list }}
{{ l|map('nofilter')|list }}
{{ s|nofilter }}
{{ s is notest }}
{{ d|tojson }} {{ q|tojson }} {{ u|tojson }} {{ u|tojson(ensure_ascii=true) }} {{ [1, 2.0, none, true, 1e-7, 1e16]|tojson }} {{ '<&>\'"'|tojson }}
{{ d|tojson(indent=2) }} {{ [[], {}, [1]]|tojson(indent=1) }} {{ d|tojson(indent=0) }} {{ d|tojson(sort_keys=true) }} {{ d|tojson(separators=(',', ':')) }} {{ d|tojson(indent='--') }} {{ d|tojson(indent=2, separators=('; ', '=')) }}
{{ x|tojson }}
{{ {1: 2, none: 3, true: 4, 2.5: 5}|tojson }} {{ (1, (2,))|tojson }} {{ n|tojson }} {{ none|tojson }} {{ f|tojson }} {{ '\x7f\x1f\u2028'|tojson }} {{ '\x7f\U0001f600'|tojson(true) }}
{{ d|items|list }} {{ x|items|list }} {{ d|dictsort }} {{ d|dictsort(true) }} {{ {'b': 1, 'A': 2}|dictsort(by='value', reverse=true) }}
{{ l|items }}
{{ lines|indent }}|{{ lines|indent(2, true) }}|{{ lines|indent(width='> ', blank=true) }}|{{ 'a'|indent(3, first=true) }}|{{ e|indent }}|
{{ ('word ' * 80)|truncate }} {{ s|truncate(5) }} {{ 'foo bar baz qux'|truncate(9) }} {{ 'foo bar baz qux'|truncate(9, True) }} {{ 'foo bar baz qux'|truncate(11, False, '...', 0) }} {{ 'foo bar baz qux'|truncate(11) }}
{{ '42'|int }} {{ ' 42 '|int }} {{ '4.7'|int }} {{ 'x'|int }} {{ 'x'|int(5) }} {{ 4.7|int }} {{ -4.7|int }} {{ true|int }} {{ none|int }} {{ '1e3'|int }} {{ '4.5'|float }} {{ 'x'|float }} {{ 3|float }} {{ '+7'|int }} {{ []|int }}
{{ 2.5|round }} {{ 3.5|round }} {{ 2.345|round(2) }} {{ 2.1|round(method='ceil') }} {{ 2.19|round(1, 'floor') }} {{ 7|round }} {{ -2.5|round }}
{{ n|string ~ '!' }} {{ [1]|string }} {{ none|string }} {{ x|string }}| {{ '%s is %d'|format('a', 3) }} {{ '%s%%'|format(1.5) }} {{ '%03d|%-4d|%.2f'|format(7, 7, 1.005) }} {{ '%s' % 'a' }} {{ '%s-%s' % ('a', [1]) }} {{ 'x'|center(6) }}|
{{ '%s %s' % 'a' }}
{{ '%d' % 'a' }}
{{ '<b>'|safe }} {{ s|safe|length }} {{ 'a' ~ ('<'|safe) }}
{{ pad.strip() }}| {{ pad.lstrip() }}| {{ pad.rstrip() }}| {{ 'xxaxx'.strip('x') }} {{ 'abcab'.strip('ba') }} {{ 'abc'.lstrip('ba') }} {{ 'abc'.rstrip('cb') }} {{ '\n\na\n'.strip('\n') }} {{ pad.strip(none) }}|
{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ ' a b  c '.split(none, 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ' a b  c '.rsplit(none, 1) }} {{ 'abc'.split('abc') }} {{ ''.split() }} {{ ''.split(',') }} {{ 'aXXbXXc'.rsplit('XX') }} {{ 'aaa'.rsplit('aa') }} {{ 'a b'.split(maxsplit=1) }} {{ 'a,b'.split(sep=',')[-1] }}
{{ 'a'.split('') }}
{{ lines.splitlines() }} {{ lines.splitlines(true) }} {{ ''.splitlines() }} {{ 'a\x0bb\x1cc\u2028d\r'.splitlines() }}
{{ s.startswith('Hello') }} {{ s.startswith(('x', 'H')) }} {{ s.endswith('d') }} {{ s.startswith('World', 7) }} {{ s.endswith('lo', 0, 5) }} {{ s.startswith('') }} {{ e.startswith('a') }} {{ s.startswith('o', -4) }}
{{ s.startswith(1) }}
{{ s.replace('o', '0') }} {{ s.replace('o', '0', 1) }} {{ s.upper() }} {{ s.lower() }} {{ 'they\'re bill\'s'.title() }} {{ 'hELLO wORLD'.capitalize() }} {{ ', '.join(['a', 'b']) }} {{ ''.join(words) }}
{{ ', '.join([1]) }}
{{ s.find('o') }} {{ s.rfind('o') }} {{ s.find('zz') }} {{ u.find('e') }} {{ s.index('W') }} {{ s.count('l') }} {{ u.count('') }} {{ s.find('o', 5) }} {{ s.find('o', 5, 7) }} {{ 'aXbX'.count('X', 2) }}
{{ s.index('zz') }}
{{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.partition('=') }} {{ 'abc'.rpartition('=') }} {{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('bc') }} {{ 'abc'.removesuffix('x') }}
{{ '12'.isdigit() }} {{ '1a'.isdigit() }} {{ ''.isdigit() }} {{ 'ab\u00e9'.isalpha() }} {{ 'a1'.isalnum() }} {{ ' \t'.isspace() }} {{ 'AB'.isupper() }} {{ 'A1'.isupper() }} {{ '1'.isupper() }} {{ 'a b'.islower() }} {{ '\u00b2'.isdigit() }} {{ '\u00bd'.isalnum() }} {{ '\u4e2d'.isalpha() }}
{{ 'a'.ljust(3) }}| {{ 'a'.rjust(3, '*') }} {{ 'a'.center(4) }}| {{ 'ab'.center(5, '.') }} {{ '-5'.zfill(4) }} {{ 'abc'.zfill(2) }} {{ 'ab'.center(4) }}|
{{ words.index('c') }} {{ [1, 1.0, true, 2].count(1) }}
{{ words.index('zz') }}
{{ words.append('x') }}
{{ d.pop('b') }}
{{ d.update({}) }}
{{ s is string }} {{ n is string }} {{ n is number }} {{ t is number }} {{ t is integer }} {{ n is integer }} {{ f is float }} {{ t is boolean }} {{ d is mapping }} {{ l is mapping }} {{ l is sequence }} {{ s is sequence }} {{ d is sequence }} {{ n is sequence }} {{ l is iterable }} {{ n is iterable }} {{ none is iterable }} {{ x is iterable }} {{ x is sequence }} {{ (l|map('abs')) is iterable }} {{ (l|map('abs')) is sequence }}
{{ x is defined }} {{ x is undefined }} {{ none is defined }} {{ none is none }} {{ x is none }} {{ t is true }} {{ 1 is true }} {{ no is false }} {{ 0 is false }} {{ d.zz is defined }} {{ d['b'] is defined }} {{ range is callable }} {{ s is callable }}
{{ 3 is odd }} {{ 4 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 1 is eq 1 }} {{ 1 is equalto(2) }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 2 is ge(2) }} {{ 1 is in [1, 2] }} {{ 1 is not in [1] }} {{ 'a' is lower }} {{ 'A' is upper }} {{ none is sameas none }} {{ n is not none }} {{ n is not string }} {{ 1 is le 1 }} {{ 3 is gt 2 }} {{ 3 is greaterthan 4 }}
{{ n is defined and n > 3 }} {{ not x is defined }} {{ x is not defined or y }}
{{ n is number is string }}
{% for i in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.length }}{{ loop.previtem }}|{{ loop.nextitem }}|{{ loop.cycle('a', 'b') }}{{ loop.changed(i > 1) }} {% endfor %}
{% for i in l if i != 1 %}{{ i }}{{ loop.index }}/{{ loop.length }}{{ loop.last }};{% endfor %} {% for i in [] %}x{% else %}empty{% endfor %} {% for i in l if i > 9 %}x{% else %}none{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }}{% endfor %} {% for c in u %}<{{ c }}>{% endfor %} {% for i in x %}a{% else %}b{% endfor %} {% for (a, b) in [(1, 2), [3, 4]] %}{{ a }}{{ b }}{% endfor %} {% for a, b in ['xy'] %}{{ a }}-{{ b }}{% endfor %}
{% for i in none %}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% for i in n %}{% endfor %}
{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %} {% for i in range(2) %}{% for j in range(3) %}{% if j == 1 %}{% break %}{% endif %}{{ i }}{{ j }} {% endfor %}{% endfor %} {{ range(1, 10, 3)|list }} {{ range(3, 0, -1)|list }} {{ range(5)[1] }} {{ range(4)|length }}
{% break %}
{% set a = 1 %}{% for i in l %}{% set a = a + i %}{{ a }}{% endfor %}{{ a }} {% set ns = namespace(a=1) %}{% for i in l %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }} {% if true %}{% set b = 5 %}{% endif %}{{ b }} {% set p, r = 1, 2 %}{{ p }}{{ r }} {% set z = 1, 2 %}{{ z }} {{ ns.missing }}|
{% set ns = namespace({'k': 1}, j=2) %}{{ ns.k }}{{ ns.j }}{{ ns['k'] }}|{% set m = dict(a=1, b=2) %}{{ m }} {{ dict({'a': 1}, b=2) }} {{ dict([('x', 1)]) }}
{% set ns.a = 1 %}
{% set s.a = 1 %}
{% set a, b = [1] %}
{% set body %}  x {{ n }}
y{% endset %}[{{ body }}]{% set c | upper | trim %} abc {% endset %}[{{ c }}]{% set k %}{% set inner = 1 %}{% endset %}{{ inner }}|{% filter upper %}a{{ s }}{% endfilter %}
{% with a = 1, b = n %}{{ a }}{{ b }}{% set cc = 1 %}{% endwith %}{{ a }}|{{ cc }}|
{% macro m(a, b=2, c=a) %}[{{ a }}{{ b }}{{ c }}{{ varargs }}{{ kwargs }}]{% endmacro %}{{ m(1) }}{{ m(1, 3, 4, 5) }}{{ m(b=1, a=0, z=9) }}{{ m() }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{{ a }}{% endmacro %}{{ m(q=2) }}
{% macro f(x) %}{{ x }}{% if x > 0 %},{{ f(x - 1) }}{% endif %}{% endmacro %}{{ f(4) }} {% macro o() %}<{{ caller() }}>{% endmacro %}{% call o() %}in {{ n }}{% endcall %} {% macro w() %}{{ caller('v') }}{% endmacro %}{% call(v) w() %}={{ v }}={% endcall %} {% macro see() %}{{ later }}{% endmacro %}{% set later = 3 %}{{ see() }} {{ f(1)|length }}
{{ raise_exception('no') }}
{% if n == 7 %}seven{% elif n == 8 %}eight{% else %}other{% endif %} {% if x %}a{% elif none %}b{% elif l %}c{% endif %} {% if not l %}a{% endif %}|{% if '' or 0 or [] %}a{% else %}b{% endif %} {% if n == 7 and (f > 3 or s) %}y{% endif %}
{% raw %}{{ n }} {% if %} {# #}{% endraw %} {#- c -#}  a  {#+ d +#} {%- raw -%}  x  {%- endraw -%} y
{% if true %}
  a
{% endif %}
  {% if true %}
  b
  {% endif %}
c
   {%- if true %}   d   {%- endif %}   e
 {{- 'f' -}}   g
   {%+ if true +%}
 h{% endif %}   {# c #}
i {% if true %}  {% endif %} j
a{{ "\n" }}
{{ 'b' }}

  {{- 'c' }}  
{% set x = 1 -%}
   z
{{ {'a': {'b': 1}}['a']['b'] }}{{ {'x': {}} }} {{ '}}' }} {{ "%}" }} {{ '{{' }} { { }} } %} #} {
{{ n
   + 1 }}{{ n }}{%
 if n %}x{%endif%}{%for i in l%}{{i}}{%endfor%}{{-n-}} {{ -n }} {{+n}}
{{ l|map('abs') is iterable }} {{ l is iterable and l is not string }} {{ (l|first).real is defined or true }} {{ people[0].name }} {{ people.0.name }} {{ nested.0.1.0 }} {{ d.a.x.0 }}
{{ strftime_now('%d %B %Y') }} {{ strftime_now('') }}| {{ strftime_now('%Y-%m-%d') }} {{ strftime_now is defined }}
{{ range }}
{{ s.__class__ }}
{{ ''.__class__.__mro__ }}
{{ namespace(_a=1) }}
{% set ns = namespace() %}{% set ns._a = 1 %}
{{ range(100001) }}
{{ range(3, 1, 0) }}
{{ n // 0 }}
{{ n / 0 }}
{{ n % 0 }}
{{ {[1]: 2} }}
{{ 'a' if }}
{{ }}
{{ n
{% if n %}
{% endif %}
{% for %}{% endfor %}
{% unknown %}
{{ n | }}
{{ (n }}
{{ n) }}
{{ [1, 2 }}
{{ 'abc }}
{# no end
{% set %}
{% set 1 = 2 %}
{% set true = 2 %}
{% macro %}{% endmacro %}
{{ n ! 2 }}
{{ 1 if 2 else }}
{{ a.1.b }}
{{ f(a=1, 2) }}
{{ n is }}
{% if n %}{% else %}{% elif n %}{% endif %}
{{ l|join(d=', ') }} {{ s|replace(old='l', new='x') }}
{{ l|join(zz=1) }}
{{ s|trim(1, 2, 3) }}
{{ lines|indent(2)|trim|upper|length }} {{ (s ~ n)|lower|first|upper }} {{ s|list|join|length }} {{ (n, s)|last|lower }} {{ l|sort|first + 1 }} {{ 'a' + 'b' | upper }} {{ ('a' + 'b') | upper }} {{ n + l|length }} {{ 2 * 3|string }}
{{ {'a': 1}.a }} {{ [1, 2][0] }} {{ (1, 2)[1] }} {{ 'abc'[1] }} {{ {'a': {'b': 2}}.a.b }} {{ [[1]][0][0] }} {{ 'a b'.split()[1].upper() }} {{ ('x' * 3).upper() }} {{ {'k': 'v'}['k'].upper() }}
{% generation %}{{ n }}{% endgeneration %} {%- generation -%} x {%- endgeneration -%} {% set g = 0 %}{% generation %}{% set g = 1 %}{% endgeneration %}{{ g }}
{% for i in l %}{% for j in l %}{{ loop.index }}{% endfor %}{{ loop.index }} {% endfor %} {% for i in l %}{% set outer = loop %}{% for j in l %}{{ outer.index }}{% endfor %}{% endfor %} {% for i in l %}{% set i = 9 %}{{ i }}{% endfor %}{{ i }}|
{% set ns = namespace(stop=false) %}{% for i in range(6) if not ns.stop %}{{ i }}{% if i == 2 %}{% set ns.stop = true %}{% endif %}{% endfor %} {% set ns = namespace(stop=false) %}{% for i in range(6) if not ns.stop %}{{ i }}{{ loop.last }}{% if i == 2 %}{% set ns.stop = true %}{% endif %}{% endfor %}
"""


def language():
    """Lines that open a construct of several lines are joined: a snippet ends where brackets and blocks do."""
    compile_ = chat_template_utils._compile_jinja_template
    pieces, lines = [], SNIPPETS.strip("\n").split("\n")
    whole = {"{% if true %}": 12, "a{{ \"\\n\" }}": 6, "{{ n": 3}
    i = 0
    while i < len(lines):
        size = 1
        for start, count in whole.items():
            if lines[i] == start and not (start == "{{ n" and not lines[i + 1].startswith("   +")):
                size = count
        if lines[i].startswith("{% set body %}"):
            size = 2
        pieces.append("\n".join(lines[i:i + size]))
        i += size
    out = []
    for piece in pieces:
        case = {"template": piece}
        try:
            case["text"] = compile_(piece).render(**VARIABLES)
        except Exception as error:
            case["error"] = type(error).__name__
        if " at 0x" in case.get("text", ""):
            case = {"template": piece, "error": "shows an object of Python"}
        out.append(case)
    # Ends of lines, and what stands at the end of a template.
    for piece in ["a\r\nb\rc\n", "{% if true %}\r\nx\r\n{% endif %}\r\n", "x\n\n", "{{ 'a\r\nb' }}", "\n{{ n }}\n", "{{ n }}\n \n", ""]:
        out.append({"template": piece, "text": compile_(piece).render(**VARIABLES)})
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tokenizers/qwen2/tokenizer.json"), bos_token="<s>", eos_token="</s>")
    continued = []
    for name, conversation in CONTINUED:
        text = tokenizer.apply_chat_template(conversation, chat_template=(OUT / f"{name}.jinja").read_text(), tokenize=False,
                                             continue_final_message=True)
        continued.append({"template": name, "conversation": conversation, "text": text})
    value = {"now": NOW, "variables": VARIABLES, "snippets": out, "continued": continued}
    (OUT / "language.json").write_text(json.dumps(value, ensure_ascii=True, indent=0) + "\n")
    print(len(out), "snippets,", sum("error" in case for case in out), "errors")


if __name__ == "__main__":
    cases()
    language()
