"""Rows as other trainers write them, and the files that hold them."""

import json

import pytest

from lowmem.data.conversations import read_conversation
from lowmem.data.sources import Record
from lowmem.data.tokenizer import byte_level_tokenizer
from lowmem.errors import InputError
from tests.data.test_dataset import CONVERSATION, END, load, shown, trained_text, write_rows

CALL = {"name": "add", "arguments": {"a": 2}}
TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools;{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def read(tmp_path, *rows, tokenizer=None, **options):
    """(text, trained text) of each row as a batch has it, without the ends of text."""
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = load(path, tokenizer, seq=512, batch=len(rows), eval_data=str(path), **options)
    batch = data.evaluations[0].batch(0)
    texts = ["".join(token for token, _ in shown(batch, row)).rstrip("$") for row in range(len(rows))]
    return [(text, trained_text(batch, row).rstrip("$")) for row, text in enumerate(texts)]


def messages_of(row, column="messages"):
    return read_conversation(Record("rows.jsonl:1", row), column).messages


def test_sharegpt_rows_read_as_messages_and_a_system_column_is_said_first(tmp_path):
    sharegpt = [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "user", "value": "Bye"},
        {"from": "assistant", "value": "See you"},
    ]
    openai = {"messages": [{"role": "system", "content": "Be kind."}, *CONVERSATION]}
    expected = read(tmp_path, openai)
    assert expected[0][1] == " Hello$ See you"
    for row in (
        {"conversations": sharegpt, "system": "Be kind.", "id": 7},
        {"conversations": [{"from": "system", "value": "Be kind."}, *sharegpt], "system": "Be kind."},
        {"conversations": CONVERSATION, "system": "Be kind."},
    ):
        assert read(tmp_path, row) == expected
    assert messages_of({"conversations": sharegpt, "system": ""}, "conversations") == CONVERSATION


def test_calls_of_tools_read_alike_from_openai_and_sharegpt_rows(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = TOOL_TEMPLATE
    question, answer = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two"}
    returned = {"role": "tool", "content": "2", "tool_call_id": "1"}
    as_text = {"id": "1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    schema = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    openai = [question, {"role": "assistant", "content": None, "tool_calls": [as_text]}, returned, answer]
    sharegpt = [
        {"from": "human", "value": "2?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "Two"},
    ]
    expected = [('1 tools;[user]2?;[assistant]<add {"a": 2}>;[tool]2;[assistant]Two;', '<add {"a": 2}>;Two;')]
    assert read(tmp_path, {"messages": openai, "tools": schema}, tokenizer=tokenizer) == expected
    assert read(tmp_path, {"messages": openai, "tools": json.dumps(schema)}, tokenizer=tokenizer) == expected
    assert read(tmp_path, {"conversations": sharegpt, "tools": schema}, tokenizer=tokenizer) == expected
    with pytest.raises(InputError, match=r"rows\.jsonl:1: the chat template leaves out tool calls.*--chat-template"):
        read(tmp_path, {"messages": openai, "tools": schema})  # the default template knows none


def test_parts_of_text_are_joined_and_a_weight_of_0_is_not_trained(tmp_path):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    first = {"role": "assistant", "content": parts}
    rows = [{"messages": [CONVERSATION[0], first, *CONVERSATION[2:]]}]
    assert read(tmp_path, *rows) == read(tmp_path, {"messages": CONVERSATION})
    assert (
        read(tmp_path, {"messages": [CONVERSATION[0], {**first, "weight": 0}, *CONVERSATION[2:]]})[0][1] == " See you"
    )


def test_of_prompt_and_completion_as_messages_only_the_completion_is_trained(tmp_path):
    marked = byte_level_tokenizer()
    marked.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}Assistant:{% generation %} {{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% else %}User: {{ m.content }}\n\n{% endif %}{% endfor %}"
    )
    row = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    for tokenizer in (None, marked):
        assert read(tmp_path, row, tokenizer=tokenizer)[0][1] == " See you"
    everything = read(tmp_path, row, train_on="all")[0][1]
    assert everything == "ser: Hi\n\nAssistant: Hello$User: Bye\n\nAssistant: See you"


def test_dolly_rows_are_alpacas_under_other_names(tmp_path):
    alpaca = [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hi"},
    ]
    dolly = [
        {"instruction": "Add.", "context": "1 2", "response": "3", "category": "closed_qa"},
        {"instruction": "Greet.", "context": "", "response": "Hi", "category": "chat"},
    ]
    assert read(tmp_path, *dolly) == read(tmp_path, *alpaca)


BAD_ROWS = {
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages, message 1: a part of kind image_url is not text",
    ),
    "no role": ({"messages": [{"content": "Hi"}]}, "messages, message 1: there is no role"),
    "no content": ({"messages": [{"role": "user", "content": None}]}, "message 1: there is no content"),
    "a number": ({"messages": [{"role": "user", "content": 5}]}, "message 1: content must be text or a list of parts"),
    "half a pair": ({"messages": [{"role": "user", "content": "\ud800"}]}, "message 1: content holds half a surrogate"),
    "a bad call": (
        {"conversations": [{"from": "function_call", "value": "add(2)"}]},
        "conversations, message 1: function_call is not JSON",
    ),
    "bad arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "2)"}}]}]},
        "message 1: the arguments of add are not JSON",
    ),
    "a call without a name": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "message 1: a tool call must be an object",
    ),
    "bad tools": ({"messages": CONVERSATION, "tools": ["add"]}, "tools must be a list of objects"),
    "a text as completion": ({"prompt": CONVERSATION[:1], "completion": "a"}, "completion must be a list of objects"),
    "nobody answers": ({"prompt": CONVERSATION[:2], "completion": CONVERSATION[:1]}, "no answer of the assistant"),
    "two readings": ({"messages": [], "conversations": []}, r"more than one way \(messages or conversations\)"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_refused_with_its_place(tmp_path, case):
    row, message = BAD_ROWS[case]
    with pytest.raises(InputError, match=rf"rows\.jsonl:1: .*{message}") as caught:
        read(tmp_path, row)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)


# Files


@pytest.mark.parametrize(
    "content",
    [
        {"data": [{"text": "one"}, {"text": "and the second one"}]},
        {"version": 2, "tags": ["a"], "empty": [], "rows": [{"text": "one"}, {"text": "and the second one"}]},
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_object_with_one_list_of_rows_is_that_list(tmp_path, content, indent):
    (tmp_path / "a.json").write_text(json.dumps(content, indent=indent))
    assert load(tmp_path / "a.json").train.parts[0].documents.tokens[:].tolist() == [
        *b"one",
        END,
        *b"and the second one",
        END,
    ]


def test_a_json_file_may_be_one_row_or_json_lines(tmp_path):
    row = {"messages": CONVERSATION}
    (tmp_path / "a.json").write_text(json.dumps(row, indent=1))
    assert load(tmp_path / "a.json", seq=128, batch=1).train.rows == 1
    (tmp_path / "a.json").write_text(json.dumps(row))
    assert load(tmp_path / "a.json", seq=128, batch=1).train.rows == 1
    (tmp_path / "a.json").write_text("\n" + json.dumps(row) + "\n" + json.dumps(row))
    assert load(tmp_path / "a.json", seq=128, batch=1).train.rows == 2
    (tmp_path / "a.json").write_text(json.dumps({"a": [row], "b": [row]}))
    with pytest.raises(InputError, match=r"a\.json:1: nothing to train on in the columns \(a, b\)"):
        load(tmp_path / "a.json")


def test_a_pattern_reads_what_it_finds_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in (("b.md", "# second\n"), ("a.md", "# first one\n"), ("sub/c.md", "# third\n"), ("d.rst", "no")):
        (tmp_path / name).write_text(text)
    data = load(f"{tmp_path}/*.md")
    assert data.train.parts[0].documents.tokens[:].tolist() == [*b"# first one\n", END, *b"# second\n", END]
    assert load(f"{tmp_path}/**/*.md").train.parts[0].documents.tokens[:].tolist()[-9:] == [*b"# third\n", END]
    assert "2 files (.rst left out)" in load(f"{tmp_path}/?.*").description.replace("3 files", "2 files")
    for pattern in ("*.rst", "*.txt"):
        with pytest.raises(InputError, match="the pattern finds no file of the kinds"):
            load(tmp_path / pattern)
